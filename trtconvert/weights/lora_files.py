"""Checks of LoRA files that need neither torch nor the model, for builds that the cache answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trtconvert.documents import safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.weights.lora_names import DENOISER, component_of, further_denoiser, named

PEFT_CONFIG = "adapter_config.json"
"""The settings that peft saves beside its file."""

_FIRST = "the first"
"""A pipeline's denoiser without a number."""


def refuse_unreadable(path: Path) -> None:
    """
    Raises:
        UserError: the file is not there, or is no safetensors file. No code in it is executed.
    """
    remedy = "check the path: of a recipe it is relative to the recipe, of a bundle or a call to the current folder"
    if not path.is_file():
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        raise UserError(
            f"there is no LoRA {path}",
            expected="a safetensors file",
            got="a folder" if path.is_dir() else "no such file",
            remedy=f"name the file in it, {inside[0]}" if inside else remedy,
        )
    start = b""
    try:
        with path.open("rb") as file:
            start = file.read(2)
        safetensors_header(path)
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError, ValueError) as error:
        pickled = start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        raise UserError(
            f"the LoRA {path} cannot be read",
            expected="a safetensors file",
            got="a pickled file, which may hold code" if pickled else first_line(error),
            remedy="if you trust it, convert it once: safetensors.torch.save_file(torch.load(path, weights_only=True), "
            "'lora.safetensors')"
            if pickled
            else "get the file again",
        ) from error


def settings_beside(path: Path) -> Path | None:
    """The file beside a LoRA that may have its alphas."""
    beside = path.with_name(PEFT_CONFIG)
    return beside if beside.is_file() else None


def left_over(loras: Sequence[tuple[Path, str]]) -> Iterator[tuple[Path, list[str]]]:
    """Files with parts that no entry of a recipe takes: for other components, or for the other denoiser of a pipeline of two.

    Args:
        loras: files and the components that they are merged into.
    Raises:
        UserError: see `refuse_unreadable`.
    """
    for path in dict.fromkeys(path for path, _ in loras):
        refuse_unreadable(path)
        with safe_open(path, framework="numpy") as file:
            parts = {(component_of(name)[0], further_denoiser(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
        taken = {target for other, target in loras if other == path}
        missing = named({of for of, _ in parts if not taken & set(of)})
        denoisers = {further for of, further in parts if of in ((), (DENOISER,))}
        if DENOISER in taken and len(denoisers) > 1:
            names = " or ".join(sorted(further or _FIRST for further in denoisers))
            missing.insert(0, f"the denoiser that is not this recipe's ({names}; a recipe of its own takes them)")
        if missing:
            yield path, missing
