"""Traced models: nodes with tables, names of weights, and refusals."""

import copy
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import tolerances
import torch
from attention_graphs import TABLES, run
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bundle import NAMESAKE, TRANSPOSED
from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.export import storage
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.torch_export import exported_to_onnx
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error as error


@pytest.fixture(scope="module")
def site_tables(digits):
    tables = {}

    def handler(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 4, "height": 8, "width": 8}))
    return tables


@pytest.fixture(scope="module")
def traced(digits, site_tables):
    chosen = {name: site_tables[name] for name in ("blocks.0.attn", "blocks.3.attn")}
    return chosen, trace(digits, chosen, SiteOptions(1000.0, "calibrated", True), dims=digits.dims)


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 8, 8), (3, 8, 8), (2, 4, 12)])
def test_the_traced_model_serves_any_batch_and_sequence(digits, traced, batch, height, width):
    chosen, model = traced
    inputs = digits.example(7, {"batch": batch, "height": height, "width": width})

    def handler(call):
        if call.name not in chosen:
            return call.exact()
        return reference.attention(call.q, call.k, call.v, call.timestep, chosen[call.name], softmax_scale=call.scale)

    with torch.no_grad():
        expected = intercepted(digits, handler)(**inputs)
    got = run(model, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, expected) < tolerances.WHOLE_DENOISER


class Namesakes(nn.Module):
    """A denoiser whose weights have the names of inputs and output, each used directly and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_models.Tiny()
        self.names = ("x", "timestep", "prediction")
        generator = torch.Generator().manual_seed(0)
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4, generator=generator) / 2))

    def forward(self, x, timestep):
        for name in self.names:
            x = x @ self.get_parameter(name) @ self.get_parameter(name).T
        return self.inner(x, timestep)


def test_weights_that_are_called_as_an_input_have_names_to_replace_them_by():
    """The exporter would number them, `x_1`, which no refit could tell from a weight of that name."""
    model = replace(tiny_models.build(), denoiser=Namesakes().eval().requires_grad_(False))
    q = torch.ones(1, 1, 16, tiny_models.WIDTH)
    tables = {"inner": tables_from_data(q, q, q, Mode.FP16)}
    exported = trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
    assert [x.name for x in (*exported.graph.inputs, *exported.graph.outputs)] == ["x", "timestep", "prediction"]
    for name in model.denoiser.names:
        weight = model.denoiser.get_parameter(name)
        for found, expected in ((name + NAMESAKE, weight), (name + TRANSPOSED, weight.T)):
            assert np.array_equal(exported.graph.initializers[found].const_value.numpy(), expected.numpy())
    inputs = model.example(0, {"batch": 2})
    got = run(exported, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, model.denoiser(**inputs)) < tolerances.WHOLE_DENOISER


@pytest.mark.soak
def test_a_denoiser_may_be_in_half_precision_already(digits, traced):
    """The denoiser itself stays in full precision."""
    chosen, _ = traced
    half = replace(digits, denoiser=copy.deepcopy(digits.denoiser).half())
    options = SiteOptions(1000.0, "calibrated", True)
    models = [trace(model, chosen, options, dims=digits.dims, dtype=torch.float16) for model in (half, digits)]
    assert {p.dtype for p in digits.denoiser.parameters()} == {torch.float32}
    kept, converted = (
        {name: value.const_value.numpy() for name, value in model.graph.initializers.items()} for model in models
    )
    assert {x.dtype for name, x in kept.items() if name in digits.denoiser.state_dict()} == {np.dtype(np.float16)}
    np.testing.assert_equal(kept, converted)


@pytest.mark.soak
def test_no_second_copy_in_full_precision_is_made_on_the_way_to_half(digits, traced):
    chosen, _ = traced
    largest = max(p.numel() for p in digits.denoiser.parameters())
    copied = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.clone.default and args[0].dtype == torch.float32:
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Watch():
        trace(digits, chosen, SiteOptions(1000.0, "calibrated", True), dims=digits.dims, dtype=torch.float16)
    assert max(copied, default=0) < largest


class Scaled(nn.Module):
    """Attention to tokens of one head, times a number."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        """x [B, N, D] → [B, N, D]."""
        heads = self.scale * x[:, None]
        return scaled_dot_product_attention(heads, heads, x[:, None])[:, 0]


class Blocks(nn.Module):
    """Base of the denoisers below: tokens of 32 channels."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(1, 32), nn.Linear(32, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x, timestep):
        """x [B, 1, 4, 4], timestep [B] → [B, 1, 4, 4]."""
        tokens = self.embed(x.flatten(2).transpose(1, 2)) + timestep[:, None, None] / 1000
        return self.out(self.blocks(tokens)).transpose(1, 2).reshape(x.shape)


class NamesAlike(Blocks):
    """Sites and a weight whose names differ only in separators."""

    def __init__(self):
        super().__init__()
        self.attn, self.attn_2 = Scaled(0.1), Scaled(3.0)
        self.attn_modes = nn.Parameter(torch.tensor([2.0]))

    def blocks(self, x):
        return self.attn_2(x + self.attn(x + self.attn(x))) * self.attn_modes  # attn, attn#2, attn_2


class ThreeAxes(Blocks):
    """Attention with a mask and without, of tensors that have no axis of heads, beside one that has."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(1.0)

    def blocks(self, x):
        x = x + scaled_dot_product_attention(x, x[:, :5], value=x[:, :5], attn_mask=x[..., :5] > 0, scale=0.3)
        return self.attn(x + scaled_dot_product_attention(x, x, x, None, 0.0, True))


class RowsAndColumns(Blocks):
    """Attention of the pixels of each row, and of each column, as of frames and of places: samples have four of either."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = Scaled(0.3), Scaled(0.3)

    def blocks(self, x):
        x = x.unflatten(1, (4, 4))
        x = x + self.rows(x.flatten(0, 1)).unflatten(0, (-1, 4))
        x = x.transpose(1, 2)
        return (x + self.columns(x.flatten(0, 1)).unflatten(0, (-1, 4))).transpose(1, 2).flatten(1, 2)


class ToldSizes(Blocks):
    """Attention of each image four times over, as of the frames of a video, and repetitions that are told what they come to."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(0.3)

    def blocks(self, x):
        x = x + self.attn(x.repeat_interleave(4, dim=0, output_size=4 * x.shape[0])).unflatten(0, (-1, 4)).mean(1)
        twice = torch.repeat_interleave(x, repeats=2, dim=0, output_size=2 * x.shape[0])
        return x + twice.unflatten(0, (-1, 2)).sum(1)


class WritesPositions(Blocks):
    """Positions computed in the forward, behind rows of zeros, as in CogVideoX for other sizes."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(0.3)

    def blocks(self, x):
        positions = x.new_zeros(1, *x.shape[1:])
        positions.data[:, 3:].copy_(torch.arange(x.shape[1] - 3.0)[:, None].expand(-1, x.shape[2]) / 8)
        return self.attn(x + positions)


class CountsImages(Blocks):
    def __init__(self):
        super().__init__()
        self.attn = Scaled(1.0)

    def blocks(self, x):
        return self.attn(x) + torch.tensor([1.0] * x.shape[0])[:, None, None]


def coarser_later(tables):
    """Two timestep bins; the second has twentyfold value scales."""
    two = AttentionTables(*(torch.cat([x, x]) for x in vars(tables).values()))
    two.v_scale[1] *= 20
    return two.with_modes(torch.tensor([Mode.BALANCED, Mode.AGGRESSIVE]))


@pytest.mark.first_case
@pytest.mark.parametrize(
    "denoiser",
    [NamesAlike(), ThreeAxes(), RowsAndColumns(), ToldSizes(), WritesPositions()],
    ids=lambda x: type(x).__name__,
)
def test_each_site_has_its_own_tables_or_stays_as_it_is(denoiser):
    model = replace(tiny_models.build(), denoiser=denoiser.eval().requires_grad_(False))
    tables = {}

    def observe(call):
        if not call.obstacle:
            tables[call.name] = coarser_later(tables_from_data(call.q, call.k, call.v, Mode.BALANCED))
        return call.exact()

    def quantised(call):
        if call.name not in tables:
            return call.exact()
        return reference.attention(call.q, call.k, call.v, call.timestep, tables[call.name], softmax_scale=call.scale)

    with torch.no_grad():
        intercepted(model, observe)(**model.example(0, {"batch": 2}))
        exported = trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
        for batch in (1, 3):
            inputs = model.example(7, {"batch": batch})
            got = run(exported, {name: x.numpy() for name, x in inputs.items()})
            assert error(got, intercepted(model, quantised)(**inputs)) < tolerances.WHOLE_DENOISER


class OfValues(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


class LooksAtValues(CountsImages):
    def __init__(self):
        super().__init__()
        self.chooses = OfValues()

    def blocks(self, x):
        return self.attn(self.chooses(x))


def test_models_that_cannot_be_traced_print_only_the_message_and_the_place(capfd):
    model = replace(tiny_models.build(), denoiser=LooksAtValues().eval().requires_grad_(False))
    x = torch.randn(2, 1, 16, 32)
    tables = tables_from_data(x, x, x, Mode.BALANCED)
    place = r"\(in chooses, test_trace.py:\d+\)"
    with pytest.raises(UserError, match=rf"(?s)cannot be exported.*got: .*data-dependent.*{place}.*avoid data"):
        trace(model, {"attn": tables}, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
    assert "def forward" not in "".join(capfd.readouterr())


@pytest.mark.first_case
@pytest.mark.parametrize("most", [2, 8])
def test_a_size_that_the_exporter_would_fix_is_refused(most):
    model = replace(
        tiny_models.build(), denoiser=CountsImages().eval().requires_grad_(False), dims={"batch": (1, 1, most)}
    )
    with pytest.raises(UserError, match=r"(?s)for one size only.*expected: .*batch.*got: batch = 2.*remedy: fix"):
        tiny_models.traced(model)
    tiny_models.traced(replace(model, dims={"batch": (2, 2, 2)}))


def test_only_converted_sites_are_nodes_and_tables_are_initialisers(traced):
    chosen, model = traced
    nodes = attention_nodes(model)
    assert list(nodes) == list(chosen)
    for site, node in nodes.items():
        for value, name in zip(node.inputs[4:10], TABLES, strict=True):
            held = value.const_value.numpy()
            np.testing.assert_array_equal(held, getattr(chosen[site], name).numpy())


def test_a_site_that_the_model_does_not_have_is_refused(digits, site_tables):
    tables = {"blocks.9.attn": site_tables["blocks.0.attn"]}
    with pytest.raises(UserError, match="does not hold the attention that was calibrated") as raised:
        trace(
            digits,
            tables,
            SiteOptions(1000.0, "calibrated", True),
            dims={"batch": (2, 2, 2), "height": (8, 8, 8), "width": (8, 8, 8)},
        )
    assert "blocks.9.attn" in raised.value.expected


@pytest.mark.parametrize(
    ("name", "value"), [("q_scale", 0.0), ("v_scale", float("nan")), ("k_offset", float("inf")), ("modes", 9)]
)
def test_unusable_tables_are_refused_before_they_are_baked_in(digits, site_tables, name, value):
    good = site_tables["blocks.0.attn"]
    table = getattr(good, name).clone()
    table.view(-1)[0] = value
    with pytest.raises(UserError, match=r"the tables of the site blocks\.0\.attn cannot be used") as raised:
        bad = AttentionTables(**{**vars(good), name: table})
        trace(digits, {"blocks.0.attn": bad}, SiteOptions(1000.0, "calibrated", True), dims=digits.dims)
    assert name.removesuffix("s") in raised.value.got


def test_some_sites_may_be_lowered_to_native_and_the_rest_to_the_plugin(traced):
    model = ir.from_proto(ir.to_proto(traced[1]))
    assert lower_to_native(model, ["blocks.3.attn"]) == 1
    assert list(attention_nodes(model)) == ["blocks.0.attn"]
    assert lower_to_plugin(model) == 1 and not model.functions


def test_a_site_that_the_graph_does_not_hold_is_refused(traced):
    model = ir.from_proto(ir.to_proto(traced[1]))
    with pytest.raises(UserError, match=r"no trtconvert::Int8Attention node for blocks\.9\.attn") as raised:
        lower_to_native(model, ["blocks.0.attn", "blocks.9.attn"])
    assert "blocks.3.attn" in raised.value.expected
    assert len(attention_nodes(model)) == 2  # nothing was rewritten


def test_large_weights_lie_beside_the_graph_and_are_shared_by_its_lowerings(digits, traced, tmp_path, monkeypatch):
    """The real limit is half a gigabyte."""
    monkeypatch.setattr(storage, "INLINE_LIMIT", 100_000)
    path, native = tmp_path / "model.onnx", tmp_path / "native.onnx"
    storage.save(traced[1], path)
    lowered = ir.load(path)
    lower_to_native(lowered)
    storage.save(lowered, native)
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data", "native.onnx"}
    weights = storage.weights_file(path).stat().st_size
    assert path.stat().st_size < weights > native.stat().st_size

    onnx.checker.check_model(path, full_check=True)
    feeds = {name: x.numpy() for name, x in digits.example(7, {"batch": 2, "height": 8, "width": 8}).items()}
    (result,) = onnxruntime.InferenceSession(path).run(None, feeds)
    np.testing.assert_array_equal(result, run(traced[1], feeds).numpy())


class TurnsInFloat64(nn.Module):
    """Multiplies positions by frequencies of another type, as the rotations of HiDream do; `as_list` gives operands as a list."""

    def __init__(self, as_list: bool):
        super().__init__()
        self.as_list = as_list

    def forward(self, *inputs):
        operands = (*inputs, torch.arange(1, 5, dtype=torch.float64) / 4)
        turns = torch.einsum("...n,d->...nd", *([operands] if self.as_list else operands))
        return turns.cos().float()


@pytest.mark.parametrize("as_list", [False, True])
def test_products_of_several_types_are_exported_in_their_common_type(as_list):
    x = torch.linspace(0, 700, 6).view(2, 3)
    module, spec = TurnsInFloat64(as_list), InputSpec("x", "float32", ("batch", 3))
    model = exported_to_onnx(
        module, {"x": x}, [spec], ["y"], {"batch": (1, 2, 4)}, title="turns", prefix="", remedy="none"
    )
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": x.numpy()})
    assert np.abs(got - module(x).numpy()).max() <= 1e-6


class Patches(nn.Module):
    def forward(self, *inputs):
        (x,) = inputs
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).contiguous()
        return x.view(batch, height * width // 4, 4 * channels)


def test_a_view_of_a_tensor_that_was_made_contiguous_is_exported():
    x, spec = torch.arange(128.0).view(2, 4, 4, 4), InputSpec("x", "float32", ("batch", 4, 4, 4))
    model = exported_to_onnx(
        Patches(), {"x": x}, [spec], ["y"], {"batch": (1, 2, 4)}, title="patches", prefix="", remedy="none"
    )
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.cat([x, -x[:1]])
    (got,) = session.run(None, {"x": x.numpy()})
    assert np.array_equal(got, Patches()(x).numpy())


class OneNumberForAllAxes(nn.Module):
    """Gives convolutions lists of one number, as the networks of EDM2."""

    def forward(self, *inputs):
        (x,) = inputs
        weight = torch.linspace(-1, 1, 36).view(1, 4, 3, 3)
        x = torch.nn.functional.conv2d(x, weight, padding=(1,), stride=[1])
        return torch.nn.functional.conv_transpose2d(x, weight, None, (2,))


def test_one_number_in_a_list_counts_for_all_axes_of_a_convolution():
    x, spec = torch.arange(128.0).view(2, 4, 4, 4), InputSpec("x", "float32", ("batch", 4, 4, 4))
    model = exported_to_onnx(
        OneNumberForAllAxes(), {"x": x}, [spec], ["y"], {"batch": (1, 2, 4)}, title="convs", prefix="", remedy="none"
    )
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": x.numpy()})
    assert error(torch.from_numpy(got), OneNumberForAllAxes()(x)) <= 1e-6
