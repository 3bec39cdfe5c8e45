"""Attention sites and their times, as if a GPU had measured them."""

from __future__ import annotations

import onnx_ir as ir
from torch.overrides import TorchFunctionMode

from trtconvert.bundle import NativeSite
from trtconvert.engine.attention_choice import AttentionCase
from trtconvert.errors import TrtconvertError


def case(queries, keys, layout="BHND"):
    q, k = ((2, 4, queries, 64), (2, 2, keys, 64))
    if layout == "BNHD":
        q, k = ((b, n, h, d) for b, h, n, d in (q, k))
    return AttentionCase(tuple(q), tuple(k), layout, ir.DataType.FLOAT16, "calibrated", True)


def timed_site(name, keys=64, native_us=4.0, plugin_us=3.0):
    return NativeSite(name=name, query_tokens=64, key_tokens=keys, native_us=native_us, plugin_us=plugin_us)


def refuse(*_):
    raise TrtconvertError("no such engine", got="node 7 has no implementation")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU instead of the GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
