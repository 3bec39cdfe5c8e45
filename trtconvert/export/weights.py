"""Names of weights: every initialiser that is a parameter of the denoiser is called what its state dict calls it, or so that
`trtconvert.runtime.refit` finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from trtconvert.bundle import NAMESAKE, TRANSPOSED

MERGED = 1024
"""Elements up to which onnxscript keeps one of equal initialisers."""


def name_weights(model: ir.Model, prefix: str) -> set[str]:
    """Rename the initialisers of a traced, not yet optimised model, in place.

    The results of transposing them are renamed too, `NAME.T`: constant folding leaves those in place of the weights, and
    would leave them under the exporter's numbers. Where the model has an input or an output of such a name, as of a parameter `x`
    beside a forward(x, timestep), `:weight` follows it. Engines are refitted by these names.

    Args:
        prefix: what the tracing module puts before the names of the denoiser's state dict.
    Returns:
        The names that initialisers and their transposes have now.
    """
    taken = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}

    def free(name: str) -> str:
        return name + NAMESAKE if name in taken else name

    named = set[str]()
    for name, value in list(model.graph.initializers.items()):
        if not name.startswith(prefix):
            continue
        weight = name.removeprefix(prefix)
        value.name = free(weight)
        named.add(value.name)
        transposes = [user for user, _ in value.uses() if user.op_type == "Transpose"]
        if not transposes:
            continue
        first, *again = transposes
        first.outputs[0].name = free(weight + TRANSPOSED)
        named.add(first.outputs[0].name)
        for user in again:  # a layer that is called again: two results cannot have one name
            if user.attributes["perm"].value == first.attributes["perm"].value:
                ir.convenience.replace_all_uses_with(user.outputs[0], first.outputs[0])
                model.graph.remove(user, safe=True)
    return named


@contextmanager
def weights_apart(model: ir.Model, names: set[str]) -> Iterator[None]:
    """While the block optimises a model whose weights have their names, equal ones are no duplicates, in place.

    onnxscript keeps one of small initialisers that are equal, as biases of zeros are. Refitted, it would stand for weights that
    no longer are equal, and the others' names would not be there. Transposes of weights, which constant folding would make
    unseen, are made here.

    Args:
        names: of the weights, as `name_weights` leaves them.
    """
    for name, value in list(model.graph.initializers.items()):
        if name not in names or value.const_value is None or value.const_value.size > MERGED:
            continue
        array, dtype = value.const_value.numpy(), value.const_value.dtype
        value.const_value = _Unlike(array, dtype=dtype, name=name)
        for user in [user for user, _ in value.uses() if user.op_type == "Transpose" and user.outputs[0].name in names]:
            result = user.outputs[0]
            turned = np.ascontiguousarray(array.transpose(user.attributes["perm"].value))
            folded = ir.Value(name=result.name, type=value.type, shape=ir.Shape(turned.shape))
            folded.const_value = _Unlike(turned, dtype=dtype, name=result.name)
            result.replace_all_uses_with(folded)
            model.graph.remove(user, safe=True)
            model.graph.register_initializer(folded)
    yield
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, _Unlike):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)


class _Unlike(ir.Tensor):
    """A tensor that is taken for no other, whatever its elements: its bytes, by which they are compared, end with its name."""

    def tobytes(self) -> bytes:
        return super().tobytes() + (self.name or "").encode()
