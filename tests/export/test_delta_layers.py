"""Graphs of layers that quantise deltas from step to step: their bodies and their lowering to Q/DQ against the specification."""

from dataclasses import replace

import pytest
import tolerances
import torch
from delta_layers import InOnnxRuntime, InTorch, delta_model, trajectory
from layered_graphs import count
from tiny_layers import CHOSEN, Called, model_of, random
from torch import nn

from trtconvert.bundle import NEXT
from trtconvert.errors import UserError
from trtconvert.export.delta_caches import LAST, caches_of, require_fixed_sizes
from trtconvert.export.lowering.delta_qdq import lower_deltas
from trtconvert.export.lowering.layers import expand_layers, quantise_products
from trtconvert.export.nodes.deltas import LINEAR, QUANTISE, delta_nodes, modulated_layers
from trtconvert.export.nodes.layers import layer_nodes
from trtconvert.models.recorded_calls import relative_error as error

EDGES = 0.01
"""Tolerance for values beyond INT8's rounding edges in consecutive steps, because sums are rounded elsewhere."""


CLOSE = 1.35
"""How much larger an error against full precision may be than the specification's, of a step by itself."""


@pytest.fixture(scope="module")
def changed():
    return delta_model()


@pytest.fixture(scope="module")
def wide():
    """With scales that clip no delta."""
    return delta_model(divisor=1.0)


def errors(graph, made, dtype=torch.float32, steps=None):
    """Returns the errors of each step of a trajectory."""
    ours, theirs = InOnnxRuntime(graph), InTorch(made, dtype)
    return [error(ours(**inputs), theirs(**inputs)) for inputs in steps or trajectory(made, dtype)]


def lowered(graph):
    expand_layers(graph)
    quantise_products(graph)
    lower_deltas(graph)
    assert not delta_nodes(graph) and not layer_nodes(graph) and not graph.functions
    return graph


def test_layers_that_read_one_tensor_quantise_its_deltas_once(changed):
    graph = changed.graph()
    assert tuple(modulated_layers(graph)) == CHOSEN and not layer_nodes(graph)
    kinds = [node.op_type for node in delta_nodes(graph)]
    assert kinds.count(QUANTISE) == len(CHOSEN) - 2  # k and v read what q reads
    assert kinds.count(LINEAR) == len(CHOSEN) - 1
    inputs = {value.name: list(value.shape) for value in graph.graph.inputs[2:]}
    outputs = {value.name.removesuffix(NEXT): list(value.shape) for value in graph.graph.outputs[1:]}
    assert list(inputs) == list(outputs) and next(iter(inputs)) == LAST
    assert [str(size) for size in inputs["modiff.conv.a_hat"]] == ["batch", "32", "4", "4"]
    assert [str(size) for size in inputs["modiff.mlp.0.o_hat"]] == ["batch", "16", "128"]
    assert "modiff.q.a_hat" in inputs and "modiff.k.a_hat" not in inputs and "modiff.k.o_hat" in inputs


def test_a_trajectory_is_that_of_the_specification(changed):
    """Also where deltas are clipped."""
    assert max(errors(changed.graph(), changed)) < tolerances.WHOLE_DENOISER


@pytest.mark.parametrize(
    ("dtype", "lower"), [(torch.float32, lowered), (torch.float16, list), (torch.float16, lowered)]
)
def test_a_trajectory_is_as_close_to_full_precision_as_the_specification(wide, dtype, lower):
    """FP16 and Q/DQ round more often, and may choose the neighbouring code."""
    graph = wide.graph(dtype)
    ours, theirs = InOnnxRuntime(graph if lower is list else lower(graph)), InTorch(wide, dtype)
    for inputs in trajectory(wide, dtype):
        with torch.no_grad():
            full = wide.model.denoiser(inputs["x"].float(), inputs["timestep"])
        assert error(ours(**inputs), full) < CLOSE * error(theirs(**inputs), full)


def test_q_is_as_many_as_tensors_that_layers_read(changed):
    assert count(lowered(changed.graph()), "QuantizeLinear") == len(CHOSEN) - 2


def test_rounding_errors_of_a_step_are_corrected_in_the_next_steps(changed):
    """With constant inputs, layers converge to full precision, except for the weights' error."""
    x = changed.example()["x"]
    exact = changed.layers["conv"]
    model, ours = InOnnxRuntime(changed.graph()), []
    for timestep in (900.0, 890.0, 880.0, 870.0):
        model(x=x, timestep=torch.full((2,), timestep))
        ours.append(model.caches["modiff.conv.a_hat"])
    with torch.no_grad():
        seen = torch.nn.functional.silu(changed.model.denoiser.conv_in(x)) * exact.tables.x_factor.view(1, -1, 1, 1)
    found = [error(a_hat, seen) for a_hat in ours]
    assert found[0] > 2 * found[1] and found[-1] < found[0] / 3


def test_samples_begin_one_by_one_and_do_not_read_their_caches_then(changed):
    steps = trajectory(changed)
    alone = InOnnxRuntime(changed.graph())
    for inputs in steps[:2]:
        expected = alone(**inputs)
    both, last = InOnnxRuntime(changed.graph()), steps[-1]
    for inputs in (steps[0], steps[1]):
        both(**inputs)
    for cache in both.caches.values():
        cache[1] = torch.nan if cache.dim() > 1 else -torch.inf
    # The second sample is reset, the first one continues.
    mixed = {"x": torch.stack([last["x"][0], steps[0]["x"][1]]), "timestep": torch.tensor([100.0, 900.0])}
    got, fresh = both(**mixed), InOnnxRuntime(changed.graph())(**steps[0])
    assert error(got[1:], fresh[1:]) < tolerances.WHOLE_DENOISER
    assert torch.equal(got[0], alone(**last)[0]) and expected.isfinite().all()
    assert both.caches[LAST].tolist() == [100.0, 900.0]


def test_a_timestep_that_goes_back_to_more_noise_begins_anew(changed):
    model, steps = InOnnxRuntime(changed.graph()), trajectory(changed)
    first = [model(**inputs) for inputs in steps]
    assert all(torch.equal(model(**inputs), one) for inputs, one in zip(steps, first, strict=True))
    before = model.caches["modiff.q.a_hat"]
    model(**steps[-1] | {"timestep": torch.full((2,), torch.nan)})
    assert (model.caches[LAST] == -torch.inf).all()
    again = InOnnxRuntime(changed.graph())
    assert torch.equal(model(**steps[1]), again(**steps[1])) and before.isfinite().all()


@pytest.mark.soak
def test_timesteps_that_rise_are_followed():
    made = delta_model()
    sigmas = made.model.sigmas.flip(0)
    made = replace(made, model=replace(made.model, sigmas=sigmas), _traced={})
    assert not made.model.timesteps_fall
    steps = trajectory(made)
    assert max(errors(made.graph(), made, steps=steps)) < EDGES
    model = InOnnxRuntime(made.graph())
    outputs = [model(**inputs) for inputs in (*steps, *steps)]
    assert all(torch.equal(*pair) for pair in zip(outputs[:4], outputs[4:], strict=True))


@pytest.mark.soak
def test_some_layers_may_quantise_deltas_and_others_not():
    made = delta_model(unchanged=("q", "mlp.0", "conv"))
    graph = made.graph()
    assert set(layer_nodes(graph)) == {"q", "mlp.0", "conv"}
    assert set(modulated_layers(graph)) == set(CHOSEN) - {"q", "mlp.0", "conv"}
    assert max(errors(graph, made)) < EDGES
    assert max(errors(lowered(made.graph()), made)) < 0.05  # the others have one scale for all timesteps there


WAYS = {
    "windows": (lambda self, x: self.part(x.view(-1, 4, 32)).reshape(x.shape), nn.Linear(32, 32), ("batch", 16, 32)),
    "rows": (lambda self, x: self.part(x.reshape(-1, 32)).view(x.shape), nn.Linear(32, 32), ("batch", 16, 32)),
    "images in a row": (
        lambda self, x: self.part(x.view(-1, 32, 4, 4)).reshape(x.shape), nn.Conv2d(32, 32, 3, padding=1), ("batch", 3, 32, 4, 4)
    ),
    "strides": (lambda self, x: self.part(x), nn.Conv2d(32, 32, 3, stride=2, padding=1), ("batch", 32, 5, 6)),
    "volumes": (lambda self, x: self.part(x), nn.Conv3d(32, 32, (1, 3, 3), stride=(1, 2, 2)), ("batch", 32, 2, 5, 5)),
}  # fmt: skip


@pytest.mark.first_case
@pytest.mark.parametrize("how", WAYS)
def test_layers_of_several_shapes_keep_caches_by_sample(how):
    function, part, shape = WAYS[how]
    model = model_of(Called(function, part=part.eval().requires_grad_(False)), shape)
    made = delta_model(model, include=["part"])
    steps = [
        {
            "x": random(3, *(size for size in shape if size != "batch"), seed=i) / (1 + i),
            "timestep": torch.full((3,), t),
        }
        for i, t in enumerate((900.0, 600.0, 300.0))
    ]
    assert max(errors(made.graph(), made, steps=steps)) < tolerances.SAME_ARITHMETIC
    assert max(errors(lowered(made.graph()), made, steps=steps)) < EDGES
    assert all(
        cache.shape[0] == "batch" for cache in caches_of(made.model, made.layers, made.model.dims, torch.float32)
    )


def test_sizes_that_vary_are_refused():
    model = replace(delta_model().model, dims={"batch": (1, 2, 4), "height": (4, 4, 8), "width": (4, 4, 4)})
    with pytest.raises(UserError, match=r"(?s)fixed sizes of all dimensions but the batch.*height 4\.\.8.*height: 4"):
        require_fixed_sizes(model, model.dims)
    assert require_fixed_sizes(model, {"batch": (1, 2, 4), "height": (4, 4, 4)}) is None
