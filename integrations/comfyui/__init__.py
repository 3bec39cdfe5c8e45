"""Bundles of trtconvert as MODELs of ComfyUI. Put or link this folder into `custom_nodes`; docs/comfyui.md says how."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
