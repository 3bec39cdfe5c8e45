"""The gates of a build. Does not import torch: builds from the cache run without it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from trtconvert.attention.modes import Mode
from trtconvert.bundle import ComponentRecord, QualityRecord
from trtconvert.errors import GateError
from trtconvert.linear.modes import INT8_PRODUCTS, LayerMode
from trtconvert.recipe import VerifySection


def error_limit(
    section: VerifySection, modes: Iterable[Collection[int]], layers: Iterable[Collection[int]] = ()
) -> float:
    """Returns the limit of `QualityRecord.error`.

    Args:
        modes: of each site, by timestep bin; layers: of each layer.
    """
    if section.max_error is not None:
        return section.max_error
    coarse = any(Mode.FP8 in row for row in modes) or any(set(row) & {*INT8_PRODUCTS} for row in layers)
    return 0.03 if coarse else 0.01


def check_gates(
    quality: QualityRecord,
    modes: Mapping[str, list[int]],
    section: VerifySection,
    layers: Mapping[str, list[int]] | None = None,
    scalings: Mapping[str, str] | None = None,
    masks: Collection[str] = (),
    convs: Collection[str] = (),
) -> None:
    """Checks the figures of a build.

    Args:
        modes: of each site, by timestep bin. layers: modes of each layer. scalings: of each site. masks: sites with block masks.
        convs: layers that are convolutions.
    Raises:
        GateError: a gate is missed. The message names the worst site and timestep bin.
    """
    layers = layers or {}
    db, site, index = quality.worst_site()
    worst = (
        f"the worst site is {site} in timestep bin {index}, mode {Mode(modes[site][index]).name.lower()}, {db:.1f} dB"
    )
    remedy = f"exclude {site}, or give bin {index} a more careful mode in attention.modes"
    if (scalings or {}).get(site) == "calibrated":
        remedy += ", or use attention.scaling: dynamic"
    if site in masks:
        remedy += ", or make attention.sparse (auto: plan.sparse_candidates) smaller, or off"
    if (of_layer := quality.worst_layer()) is not None:
        layer_db, layer, layer_bin = of_layer
        mode = LayerMode(layers[layer][layer_bin]).name.lower()
        worst += f"; the worst layer is {layer} in timestep bin {layer_bin}, mode {mode}, {layer_db:.1f} dB"
        # Convolutions are static where layers.modes is dynamic.
        others = "leave convolutions out (layers.kinds: [linear]), or set layers.modes to off"
        if layer not in convs:
            others = "set layers.modes to " + ("dynamic or " if mode == "static" else "") + "off"
        remedy += f"; of layers, exclude {layer} in layers.exclude, or {others}"
        db = min((db, layer_db), key=lambda found: (not math.isnan(found), found))
    checks = (
        ("PSNR of the samples, dB", quality.psnr, ">=", section.min_psnr),
        ("mean LPIPS of the samples", quality.lpips, "<=", section.max_lpips),
        ("signal to quantisation noise of the worst site or layer, dB", db, ">=", section.min_site_sqnr),
        (
            "error of the exported denoiser against the torch reference",
            quality.error,
            "<=",
            error_limit(section, modes.values(), layers.values()),
        ),
        (
            "difference between the function and the native lowering",
            quality.lowering_difference,
            "<=",
            quality.lowering_limit,
        ),
    )
    for what, got, relation, limit in checks:
        if got is None or limit is None:  # not measured
            continue
        # NaN fails both comparisons.
        if not (got >= limit if relation == ">=" else got <= limit):
            raise GateError(
                f"gate missed: {what}", expected=f"{relation} {limit:.4g}", got=f"{got:.4g}; {worst}", remedy=remedy
            )


def worst_prediction(
    errors: Sequence[float | None], type_errors: Sequence[float | None]
) -> tuple[int, float, float | None] | None:
    """Returns timestep bin, error and type error of the worst prediction; NaN is the worst. None without errors.

    Args: see `check_predictions`.
    """
    seen = {index: error for index, error in enumerate(errors) if error is not None}
    if not seen:
        return None
    index, error = max(seen.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)
    return index, error, type_errors[index] if index < len(type_errors) else None


def check_predictions(
    name: str, errors: Sequence[float | None], section: VerifySection, type_errors: Sequence[float | None]
) -> None:
    """Checks the predictions of an engine.

    Args:
        name: of the engine; errors: [T] relative L2 error of its predictions; type_errors: of the model's own type.
    Raises:
        GateError: an error is above `verify.max_prediction_error`.
    """
    limit, worst = section.max_prediction_error, worst_prediction(errors, type_errors)
    if limit is None or worst is None:
        return
    index, error, own = worst
    if not error <= limit:  # NaN fails
        of_type = "" if own is None else f"; the model's own 16-bit type alone gives {own:.3g}"
        raise GateError(
            f"gate missed: error of the prediction of {name} in timestep bin {index}",
            expected=f"<= {limit:g}",
            got=f"{error:.3g}{of_type}",
            remedy="lower plan.max_prediction_error, so that the search chooses more careful modes; or, where modes are stated, "
            f"give bin {index} a more careful one in attention.modes, or set layers.modes to dynamic; or raise "
            "verify.max_prediction_error",
        )


def check_component(name: str, component: ComponentRecord, errors: Mapping[str, float], limit: float) -> float:
    """Checks a component.

    Args:
        name: of a component; errors: relative L2 error of each output against FP32 in torch, NaN where an output is not finite.
    Returns:
        The largest error.
    Raises:
        GateError: the largest error is above the limit, or an output is not finite.
    """
    output, error = max(errors.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)
    if not error <= limit:  # NaN fails
        ways = [f"set components.{name}.layers to exact"] if component.has_int8_layers else []
        if component.outputs[0].dtype != "float32":
            ways.append(f"set components.{name}.dtype to float32")
        if math.isfinite(error):
            ways.append("raise verify.max_component_error")
        ways.append(f"leave {name} out of the section components (name the others in place of `all`)")
        raise GateError(
            f"gate missed: error of '{output}' of {name} against float32",
            expected=f"<= {limit:g}",
            got="NaN or Inf; the output is finite in float32" if math.isnan(error) else f"{error:.4g}",
            remedy=f"in the recipe, {', or '.join(ways)}; then build the bundle again",
        )
    return error
