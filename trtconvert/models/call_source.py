"""Reads the images that a pipeline's call takes off the source of diffusers, without importing it. Does not import torch."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_IMAGE = re.compile(r"\bPipelineImageInput\b|\bImage\b")
_NAMED_IMAGE = re.compile(
    r"((mask|masked|control|conditioning|reference|last|init|original)_)?images?|control_video|video"
)
"""Names of arguments that take images although they are declared as tensors."""

_MASK = "mask_image"

_NOT_IN_A_RECIPE = re.compile(r".*(latents|embeds|embeddings|embedding)")
LIST = re.compile(r"((typing\.)?Optional\[)?(typing\.)?[Ll]ist\[")
"""Begins the annotation of an argument that is declared as a list."""

_NONE = re.compile(r"\bNone\b|\bOptional\b")


@dataclass(frozen=True)
class ImageArgument:
    """An argument of a pipeline's call that takes an image.

    Attributes:
        needed: False if the declaration allows None, other than for an image and its mask, or if the argument is a video that
            the pipeline takes instead of an image.
        frames: True if the argument takes a list of images and no single image.
    """

    name: str
    needed: bool
    frames: bool


def image_arguments(pipeline: str) -> list[ImageArgument]:
    """Returns the arguments of a pipeline's call that take images.

    Args:
        pipeline: name of the class. A class that the installed diffusers does not define has no arguments.
    """
    found: list[ImageArgument] = []
    for argument, default in _call_of(pipeline):
        name, declared = argument.arg, ast.unparse(argument.annotation) if argument.annotation else ""
        of_tensors = _NAMED_IMAGE.fullmatch(name) is not None and "Tensor" in declared
        if _NOT_IN_A_RECIPE.fullmatch(name) or not (of_tensors or _IMAGE.search(declared)) or "Callable" in declared:
            continue
        # An IP-Adapter is loaded into a pipeline and is not a part of the saved folder.
        if "ip_adapter" in name:
            continue
        frames = LIST.match(declared) is not None and "Image" not in _outside_brackets(declared)
        instead = frames and any(other.needed and not other.frames for other in found)
        needed = default is None or not (instead or _NONE.search(declared))
        found.append(ImageArgument(name, needed, frames))
    if any(argument.name == _MASK for argument in found):  # inpainting
        found = [replace(x, needed=True) if x.name in (_MASK, "image") else x for x in found]
    return found


def takes_prompt(pipeline: str) -> bool:
    """Returns whether a pipeline's call takes a prompt; True for a class that the installed diffusers does not define."""
    call = _call_of(pipeline)
    return not call or any(argument.arg == "prompt" for argument, _ in call)


def _outside_brackets(declared: str) -> str:
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", declared)) != declared:
        declared = shorter
    return declared


@cache  # searches all source files of diffusers
def _call_of(pipeline: str) -> list[tuple[ast.arg, ast.expr | None]]:
    """Returns the arguments of a class's call with their defaults; none where the class or its call is not found."""
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None or not pipeline.isidentifier():
        return []
    head = re.compile(rf"^class {pipeline}\b", re.MULTILINE)
    for path in sorted((Path(spec.origin).parent / "pipelines").rglob("pipeline_*.py")):
        text = path.read_text(encoding="utf-8")
        if not head.search(text):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == pipeline:
                calls = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__call__"]
                return _with_defaults(calls[0].args) if calls else []
    return []


def _with_defaults(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(named) - len(arguments.defaults)) + list(arguments.defaults)
    return [*zip(named, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)][1:]
