"""Names initialisers after the parameters in the state dict, as `trtconvert.runtime.refit` expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from trtconvert.bundle import IN_CONSTANTS, NAMESAKE, TRANSPOSED, weight_of
from trtconvert.export.nodes.layers import BIAS_METADATA, WEIGHT_METADATA

MERGED = 1024
"""onnxscript merges equal initialisers of at most this many elements."""


def name_weights(model: ir.Model, prefix: str) -> set[str]:
    """Renames the initialisers of a traced, not yet optimised model, in place. Engines are refitted by these names.

    Transposes get the name `NAME.T`: constant folding keeps them instead of the weights. A name that is also an input or output,
    such as a parameter `x` of forward(x, timestep), gets the suffix `:weight`.

    Args:
        prefix: of the tracing module, before the names of the state dict.
    Returns:
        The new names of initialisers and transposes.
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
        for user in again:  # a layer called again: names are unique
            if user.attributes["perm"].value == first.attributes["perm"].value:
                ir.convenience.replace_all_uses_with(user.outputs[0], first.outputs[0])
                model.graph.remove(user, safe=True)
    return named


@contextmanager
def weights_apart(model: ir.Model, names: set[str]) -> Iterator[None]:
    """Keeps equal small weights apart while the block optimises a model, in place.

    onnxscript would merge equal initialisers, such as biases of zeros, and the names of the others would be missing for refits.
    Small transposes are folded here, so that they stay apart too.

    Args:
        names: of the weights, see `name_weights`.
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


def weights_of_constants(model: ir.Model, names: set[str]) -> dict[str, frozenset[str]]:
    """Returns, by name, the weights behind each value that depends on constants alone. Before optimisation.

    Args:
        names: of the weights and their transposes, see `name_weights`.
    """
    none = frozenset[str]()
    found = {name: frozenset([weight_of(name)[0]]) if name in names else none for name in model.graph.initializers}
    for node in model.graph:
        if any(x is not None and x.name not in found for x in node.inputs) or not (
            node.inputs or node.op_type == "Constant"
        ):
            continue
        of_node = none
        if node.op_type not in ("Shape", "Size"):
            of_node = none.union(*(found[x.name] for x in node.inputs if x is not None and x.name is not None))
        found |= {x.name: of_node for x in node.outputs if x.name is not None}
    return found


def mark_weights_in_constants(model: ir.Model, names: set[str], of: Mapping[str, frozenset[str]]) -> None:
    """Renames weights that the optimiser also folded into constants, in place, so that no refit replaces them alone. Weights
    that it folded everywhere have no initialiser.

    Args:
        names: see `name_weights`. of: see `weights_of_constants`.
    """
    initializers = model.graph.initializers
    in_constants = frozenset[str]().union(*(of.get(name, ()) for name in initializers if name not in names))
    for name, value in list(initializers.items()):
        if name in names and weight_of(name)[0] in in_constants:
            value.name = name + IN_CONSTANTS
    for node in model.graph:
        for key in (WEIGHT_METADATA, BIAS_METADATA):
            if node.metadata_props.get(key) in in_constants:
                del node.metadata_props[key]


class _Unlike(ir.Tensor):
    """A tensor that equals no other one: onnxscript compares bytes, and these end with the name."""

    def tobytes(self) -> bytes:
        return super().tobytes() + (self.name or "").encode()
