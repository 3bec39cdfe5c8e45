"""The weights that a bundle's INT8 layers were quantised from, so that layers of refittable engines can be quantised again.

A safetensors file beside the component's ONNX model has weights and biases by their names in the state dict, each in the smallest
type that holds its numbers, and in the metadata the tensors of each layer. A model that is stored in 16 bits takes two bytes for
each weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from trtconvert.bundle import unquantised_file
from trtconvert.linear.sites import Layer, TensorRef, model_tensors
from trtconvert.weights.tensor_files import TensorWriter, read_entries, read_entry
from trtconvert.weights.weight_files import damaged

_METADATA = "trtconvert"
_SMALLER = (torch.float16, torch.bfloat16)


def save_unquantised(model: nn.Module, layers: Iterable[Layer], onnx: Path, prefix: str = "") -> None:
    """Write the file of a component.

    Args:
        model: with the weights in full precision; layers: that become INT8.
        onnx: the component's model.
        prefix: of the names in `model`, which the state dict does not have.
    """
    tensors = {name.removeprefix(prefix): x for name, x in model_tensors(model).items()}
    refs = {
        layer.name: {
            part: None if ref is None else _of_contiguous(replace(ref, name=ref.name.removeprefix(prefix)), tensors)
            for part, ref in (("weight", layer.weight), ("bias", layer.bias))
        }
        for layer in layers
    }
    names = sorted({ref.name for of in refs.values() for ref in of.values() if ref is not None})
    said = json.dumps(
        {layer: {part: None if ref is None else asdict(ref) for part, ref in of.items()} for layer, of in refs.items()}
    )
    with TensorWriter(unquantised_file(onnx), names, len(json.dumps({_METADATA: said})) + 64) as file:
        for name in names:
            file.add(name, tensors[name].cpu(), _smallest(tensors[name]))
        file.close({_METADATA: said})


def _of_contiguous(ref: TensorRef, tensors: Mapping[str, Tensor]) -> TensorRef:
    """The place of a part of a tensor once the tensor lies row by row, as in a file."""
    whole = tensors[ref.name]
    if whole.is_contiguous() or not whole.numel():
        return ref
    places = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.int64)
    places.copy_(torch.arange(whole.numel()).view(whole.shape))
    part = replace(ref, name="places").of({"places": places})
    begin = int(part.flatten()[0])
    stride = tuple(
        int(part.select(axis, 1).flatten()[0]) - begin if size > 1 else 0 for axis, size in enumerate(ref.shape)
    )
    moved = replace(ref, offset=begin, stride=stride)
    assert torch.equal(replace(moved, name="row").of({"row": torch.arange(whole.numel())}), part)
    return moved


def _smallest(tensor: Tensor) -> torch.dtype:
    """The smallest type that holds the numbers, by rows: a copy in another type has the size of one row."""
    rows = [tensor] if tensor.dim() < 2 else tensor
    for dtype in _SMALLER:
        if all(torch.equal(row.to(dtype).to(row.dtype), row) for row in rows):
            return dtype
    return tensor.dtype


class Unquantised:
    """The file of a component, read tensor by tensor.

    Args:
        path: of the file.

    Attributes:
        refs: by layer, the tensors that its "weight" and "bias" are parts of.
        entries: the tensors' places in the file, by name; shapes: of the tensors.

    Raises:
        UserError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        entries, metadata = read_entries(path)
        self.entries = {entry.name: entry for entry in entries}
        try:
            self.refs = TypeAdapter(dict[str, dict[str, TensorRef | None]]).validate_json(metadata.get(_METADATA, ""))
            refs = [ref for of in self.refs.values() for ref in of.values() if ref is not None]
            if lost := next((ref.name for ref in refs if ref.name not in self.entries), ""):
                raise ValueError(f"no tensor {lost}")
        except ValueError as error:
            raise damaged(path, error) from error
        self.shapes = {entry.name: entry.shape for entry in entries}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        return read_entry(self.path, self.entries[name])
