"""Names of weights: every initialiser that is a parameter of the denoiser is called what its state dict calls it."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.bundle import TRANSPOSED


def name_weights(model: ir.Model, prefix: str) -> int:
    """Rename the initialisers of a traced, not yet optimised model, in place.

    The results of transposing them are renamed too, `NAME.T`: constant folding leaves those in place of the weights, and
    would leave them under the exporter's numbers. Engines are refitted by these names.

    Args:
        prefix: what the tracing module puts before the names of the denoiser's state dict.
    Returns:
        How many initialisers were renamed.
    """
    count = 0
    for name, value in list(model.graph.initializers.items()):
        if not name.startswith(prefix):
            continue
        value.name = name.removeprefix(prefix)
        count += 1
        transposes = [user for user, _ in value.uses() if user.op_type == "Transpose"]
        if not transposes:
            continue
        first, *again = transposes
        first.outputs[0].name = value.name + TRANSPOSED
        for user in again:  # a layer that is called again: two results cannot have one name
            if user.attributes["perm"].value == first.attributes["perm"].value:
                ir.convenience.replace_all_uses_with(user.outputs[0], first.outputs[0])
                model.graph.remove(user, safe=True)
    return count
