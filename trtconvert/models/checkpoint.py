"""Saves the weights of our own modules as safetensors, whole or not at all, and checks them before a module loads them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from trtconvert.documents import safetensors_header
from trtconvert.errors import UserError
from trtconvert.weights.finite import is_finite


def save_weights(module: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Writes the module's state to `path`, through a temporary file beside it."""
    partial = path.with_name(path.name + ".part")
    save_file({name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()}, partial, metadata)
    partial.replace(path)


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads the tensors of a safetensors file into the module. No code in the file is executed.

    Raises:
        UserError: the file is missing or damaged, its names or shapes are not the module's, or a weight is NaN or Inf.
    """
    remedy = f"give a file that was made for {type(module).__name__}, or train a new one"
    if not path.is_file():
        got = "Is a directory" if path.is_dir() else "no file"
        raise UserError(f"There are no weights at {path}.", expected="a safetensors file", got=got, remedy=remedy)
    try:
        safetensors_header(path)
        with safe_open(path, framework="pt") as file:
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"The weights in {path} cannot be read.", expected="a whole safetensors file", got=str(error), remedy=remedy
        ) from error

    wanted = module.state_dict()
    if missing := sorted(wanted.keys() - loaded.keys()):
        raise UserError(
            f"The weights in {path} are incomplete.",
            expected=f"{len(wanted)} tensors",
            got=f"{len(missing)} missing, {missing[0]} the first of them",
            remedy=remedy,
        )
    if unknown := sorted(loaded.keys() - wanted.keys()):
        raise UserError(
            f"The weights in {path} are for another module.",
            expected=f"only the {len(wanted)} tensors of {type(module).__name__}",
            got=f"{len(unknown)} more, {unknown[0]} the first of them",
            remedy=remedy,
        )
    for name, tensor in loaded.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            raise UserError(
                f"The weight {name} in {path} does not fit.",
                expected=f"{list(wanted[name].shape)} {wanted[name].dtype}",
                got=f"{list(tensor.shape)} {tensor.dtype}",
                remedy=remedy,
            )
        if not is_finite(tensor):
            raise UserError(
                f"The weight {name} in {path} is damaged.",
                expected="finite numbers",
                got=f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} are NaN or Inf",
                remedy=remedy,
            )
    module.load_state_dict(loaded)
