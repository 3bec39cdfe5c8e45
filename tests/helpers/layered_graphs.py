"""Models with INT8 layers as graphs, and the same arithmetic in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import tiny_layers
import torch
from tiny_layers import WITH_CONV, random
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.attention.sites import SiteCall
from trtconvert.calib.layer_observer import LayerObserver
from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.export.trace import SiteOptions, in_type, trace
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, short_scale
from trtconvert.linear.sites import ConvertedLayer, Layer, LayerFinder, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Layers, Int8Sites

STATIC = (LayerMode.STATIC, LayerMode.STATIC)


@dataclass(frozen=True)
class Int8Model:
    """A model with tables of its layers, and of its attention."""

    model: DiffusionModel
    layers: dict[str, ConvertedLayer]
    attention: dict[str, AttentionTables]
    _traced: dict[torch.dtype, ir.Model] = field(default_factory=dict)

    def graph(self, dtype: torch.dtype = torch.float32) -> ir.Model:
        """Traced, with the bodies of its nodes. A copy: the model is traced once."""
        if dtype not in self._traced:
            options = SiteOptions(self.model.timestep_max, "calibrated", True)
            layers, dims = self.layers, self.model.dims
            self._traced[dtype] = trace(self.model, self.attention, options, layers=layers, dims=dims, dtype=dtype)
        return self._traced[dtype].clone()

    def example(self, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Tensor]:
        inputs = self.model.example(1, {name: opt for name, (_, opt, _) in self.model.dims.items()} | {"batch": batch})
        return {name: x.to(dtype) if name != self.model.timestep_input else x for name, x in inputs.items()}

    @torch.no_grad()
    def torch(self, dtype: torch.dtype = torch.float32, **inputs: Tensor) -> Tensor:
        """What the reference makes of inputs."""
        tables = {name: layer.tables for name, layer in self.layers.items()}
        sites = Int8Sites(self.attention, self.model.timestep_max, "calibrated", True)
        layers = Int8Layers(tables, self.model.timestep_max)
        denoiser = intercepted(self.model, sites.handler(), layers.handler() if tables else None)
        return in_type(denoiser, dtype)(**inputs)


def int8_model(
    model: DiffusionModel | None = None,
    modes: Sequence[LayerMode] = STATIC,
    *,
    include: Sequence[str] = WITH_CONV,
    exclude: Sequence[str] = (),
    equalised: bool = True,
    moved: bool = False,
    attention: bool = False,
) -> Int8Model:
    """With tables of the model's own data.

    Args:
        equalised: whether channels have factors, moved: whether those of linear layers have offsets; all of them then, and
            by more than pays.
        attention: whether it is INT8 too.
    """
    if model is None:
        return _of_tiny_layers(tuple(modes), tuple(include), tuple(exclude), equalised, moved, attention)
    return _of_model(model, modes, include, exclude, equalised, moved, attention)


@functools.cache
def _of_tiny_layers(*asked: Any) -> Int8Model:
    """Tests that ask for the same model share one, with its graphs."""
    return _of_model(tiny_layers.build(), *asked)


def _of_model(
    model: DiffusionModel,
    modes: Sequence[LayerMode],
    include: Sequence[str],
    exclude: Sequence[str],
    equalised: bool,
    moved: bool,
    attention: bool,
) -> Int8Model:
    inputs = model.example(0, {name: opt for name, (_, opt, _) in model.dims.items()})
    finder = LayerFinder(model.denoiser)
    with torch.no_grad():
        intercepted(model, layers=finder)(**inputs)
    chosen, _ = select_layers(finder.layers(), include, exclude, 2)
    observer = LayerObserver({layer.input_group for layer in chosen}, model.timestep_max, len(modes))
    tables: dict[str, AttentionTables] = {}

    def attend(call: SiteCall) -> Tensor:
        if attention:
            tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        intercepted(model, attend, observer)(**inputs)
    rows, scales, readers = observer.finish(), dict[str, LayerScales](), dict[str, Layer]()
    for layer in chosen:
        readers.setdefault(layer.input_group, layer)
    tied = {layer.weight for layer in chosen if sum(o.weight == layer.weight for o in chosen) > 1}
    for number, (input_group, layer) in enumerate(readers.items()):
        channels = layer.in_channels
        plain = not equalised or layer.weight in tied
        factor = torch.ones(channels) if plain else short_scale((random(channels, seed=number) / 4).exp())
        offset = torch.zeros(channels) if not moved or layer.kind == "conv" else random(channels, seed=99 + number) / 4
        low, high = rows[input_group].low.amin(0), rows[input_group].high.amax(0)
        largest = (torch.maximum(high - offset, offset - low) * factor).amax()
        by_bin = torch.linspace(0.75, 1, len(modes)) if len(modes) > 1 else torch.ones(1)
        # Half as wide again as the data: Q clips at -128, where the reference clips at -127.
        scales[input_group] = LayerScales(factor, offset, short_scale(1.5 * largest / LEVELS * by_bin))
    table = torch.tensor(modes, dtype=torch.int32)
    made = layer_tables(model.denoiser, chosen, scales, {layer.name: table for layer in chosen})
    return Int8Model(model, {layer.name: ConvertedLayer(layer, made[layer.name]) for layer in chosen}, tables)


def run(model: ir.Model, **inputs: Tensor) -> Tensor:
    """What ONNX Runtime makes of a valid model."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = as_written(proto)
    feeds = {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
    return torch.from_numpy(session.run(None, feeds)[0])


def as_written(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """ONNX Runtime with no INT8 product in place of Q, DQ and a product: its own saturate in INT16 on CPUs without VNNI."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def products(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in ("MatMul", "Gemm", "Conv") and not node.domain]


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)
