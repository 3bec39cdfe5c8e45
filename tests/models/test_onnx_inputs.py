"""The inputs of an ONNX graph, sizes and conditions are told apart by names and shapes, or by the recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_graphs
import pytest
import torch
from onnx_graphs import plain

from trtconvert.errors import UserError
from trtconvert.models.onnx.model import onnx_model

BODY = plain("s = MatMul(q, kt)\np = Softmax<axis = -1>(s)")
CROSS = BODY.replace("k0 = MatMul(x, k_weight)", "k0 = MatMul(text, k_weight)").replace(
    "v0 = MatMul(x, v_weight)", "v0 = MatMul(text, v_weight)"
)
TEXT = ",float[batch, length, 64] text"


def graph(folder: Path, body: str = BODY, change=None, **options) -> Path:
    path = onnx_graphs.denoiser(folder / "model.onnx", body, **options)
    if change is not None:
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)
    return path


def refused(path: Path, *parts: str, **options) -> str:
    with pytest.raises(UserError) as error:
        onnx_model(path, **options)
    told = str(error.value)
    assert all(part in told for part in parts), told
    return told


def _renamed(**names: str):
    def change(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            value.name = names.get(value.name, value.name)
        for node in graph.node:
            for of in (node.input, node.output):
                of[:] = [names.get(name, name) for name in of]

    return change


def _timestep_of(kind: int, shape: list[int | str]):
    def change(graph: onnx.GraphProto) -> None:
        graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("timestep", kind, shape))
        first = next(node for node in graph.node if "timestep" in node.input)
        if kind != onnx.TensorProto.FLOAT:
            place = list(graph.node).index(first)
            first.input[0] = "timestep_real"
            graph.node.insert(place, onnx.helper.make_node("Cast", ["timestep"], ["timestep_real"], to=1))

    return change


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        (onnx.TensorProto.INT64, ["batch"], "int64"),
        (onnx.TensorProto.INT32, ["batch"], "int64"),
        (onnx.TensorProto.FLOAT, ["steps"], "float32"),
        (onnx.TensorProto.FLOAT, [1], "float32"),
        (onnx.TensorProto.INT64, [], "int64"),
        (onnx.TensorProto.FLOAT, [], "float32"),
    ],
)
def test_timesteps_of_every_kind_become_one_for_each_sample(kind, shape, dtype, tmp_path):
    body = BODY
    path = graph(tmp_path, body, _timestep_of(kind, shape))
    if not shape:  # a number, which the graph reshapes to [1, 1] first

        def deep(graph: onnx.GraphProto) -> None:
            reader = next(node for node in graph.node if node.op_type == "Unsqueeze" and node.output[0] == "steps")
            place = list(graph.node).index(reader)
            graph.node.insert(
                place,
                onnx.helper.make_node("Unsqueeze", [reader.input[0], "zero_axis"], ["timestep_rows"]),
            )
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero_axis"))
            reader.input[0] = "timestep_rows"

        model = onnx.load(path)
        deep(model.graph)
        onnx.save(model, path)
    model = onnx_model(path)
    assert (model.inputs[1].dtype, model.inputs[1].shape) == (dtype, ("batch",))
    sizes = {"batch": 3}
    inputs = model.example(0, sizes)
    together = model.denoiser(**inputs)
    alone = [model.denoiser(**{name: x[i : i + 1] for name, x in inputs.items()}) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert model.sample(model.denoiser, [0, 1, 2], steps=2, solver="ddim").shape[0] == 3


def test_a_timestep_with_further_axes_is_one_for_each_sample(tmp_path):
    """As in code of EDM, whose σ is [B, 1, 1, 1], and in type double, as numpy's numbers are."""

    def change(graph: onnx.GraphProto) -> None:
        first = next(node for node in graph.node if "timestep" in node.input)
        graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("timestep", onnx.TensorProto.DOUBLE, ["b", 1, 1]))
        graph.node.insert(0, onnx.helper.make_node("Cast", ["timestep"], ["timestep_real"], to=1))
        graph.node.insert(1, onnx.helper.make_node("Squeeze", ["timestep_real", "ends"], ["timestep_of_samples"]))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "ends"))
        first.input[0] = "timestep_of_samples"

    inputs = {"sample": torch.randn(3, 12, 64), "timestep": torch.tensor([3.0, 500.0, 999.0])}
    plain_one, shaped = onnx_model(graph(tmp_path)), onnx_model(graph(tmp_path, change=change))
    assert shaped.inputs[1].shape == ("batch",)
    torch.testing.assert_close(shaped.denoiser(**inputs), plain_one.denoiser(**inputs))


def test_dimensions_whose_names_are_no_identifiers_get_such_names(tmp_path):
    names = {"batch": "2*images", "length": "text length"}

    def change(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = names[dim.dim_param]

    sizes = {"2*images": 2, "text length": [3, 5, 7]}
    model = onnx_model(graph(tmp_path, CROSS, change, inputs=TEXT), sizes=sizes, conditions="random")
    assert model.dims == {"_2_images": (2, 2, 2), "text_length": (3, 5, 7)}
    assert [spec.shape[0] for spec in model.inputs] == ["_2_images"] * 3 and model.inputs[2].shape[1] == "text_length"


def test_a_timestep_for_each_token_is_refused(tmp_path):
    def change(graph: onnx.GraphProto) -> None:
        graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("timestep", 1, ["batch", 12]))

    refused(graph(tmp_path, change=change), "takes a timestep of the shape", "one for each sample")


def test_ambiguous_inputs_are_asked_for_by_option(tmp_path):
    path = graph(tmp_path, change=_renamed(timestep="noise_place", sample="what"))
    told = refused(path, "which input of", "is the timestep cannot be told", "noise_place ['batch']")
    assert "add `timestep: what` under model.options" in told
    refused(path, "no input 'noise_plac'", "did you mean 'noise_place'", timestep="noise_plac")
    model = onnx_model(path, timestep="noise_place")
    assert [spec.name for spec in model.inputs] == ["what", "noise_place"]


def test_several_timesteps_are_told_apart_by_the_recipe(tmp_path):
    body = BODY.replace(
        "joined = Reshape(back, flat)", "j = Reshape(back, flat)\nlast = Constant<value = int64[1] {2}> ()\n"
        "r1 = Unsqueeze(r_timestep, one)\nr2 = Unsqueeze(r1, last)\njoined = Add(j, r2)",
    )  # fmt: skip
    path = graph(tmp_path, body, inputs=",float[batch] r_timestep")
    refused(path, "is the timestep cannot be told", "timestep, r_timestep")
    model = onnx_model(path, timestep="timestep", values={"r_timestep": 0.5})
    assert model.as_passed["r_timestep"].tolist() == [0.5]


def test_sizes_are_asked_for_with_what_may_be_meant(tmp_path):
    path = graph(tmp_path, CROSS, inputs=TEXT)
    refused(path, "sizes of", "for length in model.options.sizes", "add `sizes: {length: 77}`", conditions="random")
    refused(path, "no dimension 'lenght'", "did you mean 'length'", sizes={"lenght": 7}, conditions="random")
    refused(path, "sizes.length does not fit", sizes={"length": [8, 4, 2]}, conditions="random")
    model = onnx_model(path, sizes={"length": [3, 5, 7], "batch": 2}, conditions="random")
    assert model.dims == {"batch": (2, 2, 2), "length": (3, 5, 7)}
    # A graph of a fixed batch draws as many samples at a time.
    seen = []

    def denoiser(**inputs):
        seen.append(inputs["sample"].shape[0])
        return model.denoiser(**inputs)

    first = model.sample(denoiser, [5, 6, 7], steps=1, solver="ddim")
    assert seen == [2, 2]
    torch.testing.assert_close(first[2:], model.sample(model.denoiser, [7, 1], steps=1, solver="ddim")[:1])


def test_sizes_that_the_graph_does_not_take_are_refused_before_the_calibration(tmp_path):
    body = BODY.replace("int64[4] {0, 0, 2, 32}", "int64[4] {2, 12, 2, 32}")
    path = graph(tmp_path, body)
    refused(path, "cannot be run with these sizes", "sample [1, 12, 64]", "at Reshape", sizes={"batch": [1, 2, 4]})
    onnx_model(path, sizes={"batch": 2})


def test_conditions_are_noise_values_or_the_rows_of_a_file(tmp_path):
    path = graph(tmp_path, CROSS, inputs=TEXT)
    sizes = {"length": 5}
    refused(path, "the values of text of", "are not given", "conditions: random", sizes=sizes)
    refused(path, "no further input 'txt'", "did you mean 'text'", sizes=sizes, values={"txt": 1})
    refused(path, "values.text does not fit", sizes=sizes, values={"text": "one"})
    rows = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", text=rows)
    seen = {}

    def denoiser(**inputs):
        seen["text"] = inputs["text"]
        return model.denoiser(**inputs)

    model = onnx_model(path, sizes=sizes, conditions="rows.npz")
    model.sample(denoiser, [1, 3], steps=1, solver="ddim")
    torch.testing.assert_close(seen["text"], torch.from_numpy(rows[[1, 0]]))
    refused(path, "does not fit 'text'", "[3, 5, 64]", sizes={"length": 7}, conditions="rows.npz")
    refused(path, "cannot read the conditions", sizes=sizes, conditions="none.safetensors")
    model = onnx_model(path, sizes=sizes, conditions="random")
    model.sample(denoiser, [1], steps=1, solver="ddim")
    noise = seen["text"]
    model.sample(denoiser, [0, 1], steps=1, solver="ddim")
    assert torch.equal(seen["text"][1:], noise)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": "scaled-linear"}, "did you mean 'scaled_linear'"),
        ({"prediction": "velocity"}, "epsilon, v_prediction, sample, flow"),
        ({"schedule": "flow", "prediction": "epsilon"}, "do not fit together"),
        ({"timesteps": 1}, "a whole number from 2"),
        ({"schedule": "flow", "shift": 0}, "a number from 1e-6 to 1e6"),
        ({"output": "out"}, "no output 'out'"),
        ({"sizes": 3}, "a mapping of names to numbers"),
        ({"values": [1]}, "a mapping of names to numbers"),
        ({"sample": 1}, "model.options.sample does not fit"),
        ({"timestep_factor": True}, "a number from 1e-9 to 1e9"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, told, tmp_path):
    refused(graph(tmp_path), told, **options)


@pytest.mark.parametrize(
    ("schedule", "prediction", "solver"),
    [
        ("linear", "epsilon", "ddim"),
        ("cosine", "v_prediction", "heun"),
        ("linear", "sample", "euler"),
        ("flow", "flow", "ddim"),
    ],
)
def test_a_denoiser_that_knows_the_image_draws_it(schedule, prediction, solver, tmp_path):
    model = onnx_model(graph(tmp_path), schedule=schedule, prediction=prediction)
    image = torch.linspace(-1, 1, 12 * 64).reshape(12, 64)

    def knows(**inputs):
        x, t = inputs["sample"].double(), inputs["timestep"].double()
        if schedule == "flow":
            share = t.view(-1, 1, 1) / 1000
            return ((x - (1 - share) * image) / share - image).float()
        sigma = model.sample.trained.schedule.sigma(t).view(-1, 1, 1)
        signal = (1 + sigma**2).rsqrt()
        noise = (x / signal - image) / sigma
        return {"epsilon": noise, "v_prediction": signal * noise - sigma * signal * image, "sample": image + 0 * x}[
            prediction
        ]

    drawn = model.sample(knows, [0, 1], steps=5, solver=solver)
    expected = (image / 8 + 0.5)[None, None].expand(2, -1, -1, -1)
    torch.testing.assert_close(drawn, expected.reshape(drawn.shape), rtol=0, atol=2e-4)


def test_an_output_with_a_variance_gives_its_prediction(tmp_path):
    def change(graph: onnx.GraphProto) -> None:
        last = next(node for node in graph.node if node.output[0] == "out_sample")
        last.output[0] = "half"
        graph.node.append(onnx.helper.make_node("Unsqueeze", ["half", "third"], ["image"]))
        graph.node.append(onnx.helper.make_node("Concat", ["image", "image"], ["out_sample"], axis=1))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "third"))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "first_axis"))
        for node in graph.node:
            node.input[:] = ["tokens" if name == "sample" else name for name in node.input]
        graph.node.insert(0, onnx.helper.make_node("Squeeze", ["sample", "first_axis"], ["tokens"]))
        graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("sample", 1, ["batch", 1, 12, 64]))
        graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("out_sample", 1, ["batch", 2, 12, 64]))

    model = onnx_model(graph(tmp_path, change=change))
    assert model.denoiser(**model.example(0, {"batch": 2})).shape == (2, 1, 12, 64)
    assert model.encoder is not None and model.encoder.shape == (1, 12, 64)
