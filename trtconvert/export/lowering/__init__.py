"""The three ways in which an `Int8Attention` node meets a runtime. Each rewrites a model in place and counts its nodes."""

from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin

__all__ = ["lower_to_function", "lower_to_native", "lower_to_plugin"]
