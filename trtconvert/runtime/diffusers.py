"""A bundle's denoiser in the place of a diffusers model: `pipe.transformer = bundle.as_diffusers()`.

diffusers is imported when one is made, not with this module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime.arguments import tensors_of


class DiffusersDenoiser(nn.Module):
    """What a pipeline needs of its `unet` or `transformer`: forward with the model's parameters, `config`, `dtype`, `device`.

    It has no parameters, so a pipeline's `to()` leaves it where it is; its output has the type and the device of what is
    denoised.

    Args:
        denoiser: takes named tensors and gives the prediction.
        record: how the pipeline calls it.
        timestep_input: the name of the timestep among them, which it takes as [B] FP32.
        dtype: the type that the pipeline should prepare its tensors in.
        device: where the denoiser runs.
    """

    def __init__(
        self,
        denoiser: Callable[..., Tensor],
        record: DiffusersRecord,
        timestep_input: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        try:
            from diffusers.configuration_utils import FrozenDict
        except ImportError as error:
            raise BackendUnavailable(
                "diffusers is not installed",
                expected="the library whose pipeline the denoiser goes into",
                got=str(error),
                remedy="pip install 'trtconvert[diffusers]'",
            ) from error
        self.config = FrozenDict(record.config)
        self.dtype, self.device = dtype, device
        self._denoiser, self._record, self._timestep = denoiser, record, timestep_input
        self._output = _output_class(record.output)
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=name == "return_dict" or None)
            for name in record.parameters
        ]
        self._signature = inspect.Signature(parameters)
        self.forward = partial(self._forward)
        self.forward.__signature__ = self._signature  # type: ignore[attr-defined]
        if size := record.config.get("projection_class_embeddings_input_dim"):
            # StableDiffusionXLPipeline checks its time ids against the width of this layer.
            self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=size))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            UserError: the arguments are not those that the denoiser was converted for, or outside its engine's profiles.
        """
        try:
            arguments = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UserError(
                f"the denoiser is called otherwise than {self._record.model}",
                expected=", ".join(self._record.parameters),
                got=str(error),
                remedy="use a diffusers version whose pipeline calls the model as the one that converted it did",
            ) from error
        return_dict = arguments.pop("return_dict", True)
        named = tensors_of(self._record.arguments, arguments)
        sample = next(x for name, x in named.items() if name != self._timestep)
        timestep = named[self._timestep].to(sample.device, torch.float32) / self._record.timestep_factor
        named[self._timestep] = timestep.reshape(-1).expand(sample.shape[0])
        for name, x in named.items():
            if not x.is_floating_point():
                named[name] = x.long()
        output = self._denoiser(**named).to(sample)
        return self._output(sample=output) if return_dict else (output,)

    @contextmanager
    def cache_context(self, *_: object, **__: object) -> Iterator[None]:
        """Pipelines name the conditional and the unconditional call; nothing is cached between calls here."""
        yield

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights of the engine by those of a model like the one that it was made of, see `TensorRTDenoiser.refit`.

        Args:
            weights: the model's state dict, some or all of it, or a safetensors file of it.
        """
        from trtconvert.runtime.refit import read_weights
        from trtconvert.runtime.tensorrt import TensorRTDenoiser

        if not isinstance(self._denoiser, TensorRTDenoiser):
            raise UserError(
                "the weights of this denoiser cannot be replaced",
                expected="a TensorRT engine built with engine.refittable: true",
                got=type(self._denoiser).__name__,
                remedy="load the bundle on a machine with its engine",
            )
        state = weights if isinstance(weights, Mapping) else read_weights(Path(weights))
        return self._denoiser.refit({f"{self._record.component}.{name}": x for name, x in state.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the converted {self._record.model} has no '{name}': what changes a model (LoRA, adapters, attention "
                "processors) is done before `trtconvert build`"
            ) from None


def _output_class(name: str) -> type:
    """The class that `package.module:Class` names, of diffusers only: a bundle must not choose what is imported.

    Raises:
        BackendUnavailable: this diffusers has no such class.
    """
    module, _, attribute = name.partition(":")
    try:
        if module.partition(".")[0] != "diffusers":
            raise ImportError(f"{module} is not a module of diffusers")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            "the class of the denoiser's output cannot be imported",
            expected=name,
            got=str(error),
            remedy="install the diffusers version that the bundle was built with; its manifest has it under versions",
        ) from error
