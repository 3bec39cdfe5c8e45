"""Saves the weights of our own modules as safetensors, whole or not at all, and checks them before a module loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from trtconvert.errors import UserError
from trtconvert.weights.finite import require_finite
from trtconvert.weights.weight_files import read_tensors


def save_weights(module: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Writes the module's state to `path`, through a temporary file beside it."""
    partial = path.with_name(path.name + ".part")
    save_file({name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()}, partial, metadata)
    partial.replace(path)


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads the tensors of a safetensors file into the module. No code in the file is executed.

    Raises:
        UserError: the file is missing or damaged, its names, shapes or types are not the module's, or a weight is NaN or Inf.
    """
    loaded, wanted = read_tensors([path]), module.state_dict()
    for name in loaded.keys() & wanted.keys():
        if loaded[name].dtype != wanted[name].dtype:
            raise _unfit(path, module, f"{name} in {wanted[name].dtype}", str(loaded[name].dtype))
    require_fitting(module, loaded, path)
    module.load_state_dict(loaded)


def require_fitting(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """
    Args:
        path: of the weights.
    Raises:
        UserError: names or shapes are not the module's, or a weight is NaN or Inf.
    """
    wanted = module.state_dict()
    if missing := sorted(wanted.keys() - weights.keys()):
        got = f"{len(missing)} missing, {missing[0]} the first of them"
        raise _unfit(path, module, f"{len(wanted)} weights", got)
    if unknown := sorted(weights.keys() - wanted.keys()):
        got = f"{len(unknown)} more, {unknown[0]} the first of them"
        raise _unfit(path, module, f"only the {len(wanted)} weights of the model", got)
    for name, x in weights.items():
        if x.shape != wanted[name].shape:
            raise _unfit(path, module, f"{name} of shape {list(wanted[name].shape)}", str(list(x.shape)))
        remedy = "get the file again, or take an earlier one of the training"
        require_finite(f"the weight {name} in {path} is damaged", x, remedy)


def _unfit(path: Path, module: nn.Module, expected: str, got: str) -> UserError:
    return UserError(
        f"the weights in {path} are not those of a {type(module).__name__}",
        expected=expected,
        got=got,
        remedy=f"give a file that was made for {type(module).__name__}, or train a new one",
    )
