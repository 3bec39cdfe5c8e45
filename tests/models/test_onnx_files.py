"""ONNX files that are damaged or hold no denoiser are refused before anything is calibrated."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx_graphs
import onnx_ir as ir
import pytest
import torch
from onnx_graphs import plain

from trtconvert.errors import UserError
from trtconvert.models.identity import identity
from trtconvert.models.onnx.files import read_graph
from trtconvert.models.onnx.model import onnx_model
from trtconvert.models.saved import with_dtype
from trtconvert.recipe import ModelSection

BODY = plain("s = MatMul(q, kt)\np = Softmax<axis = -1>(s)")


def refused(path: Path, *parts: str, **options) -> str:
    with pytest.raises(UserError) as error:
        onnx_model(path, **options)
    told = str(error.value)
    assert all(part in told for part in parts), told
    assert "remedy: " in told
    return told


def changed(path: Path, change) -> Path:
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_weights_beside_a_graph_are_read(kind, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data", kind=kind)
    assert any(isinstance(v.const_value, ir.ExternalTensor) for v in read_graph(path).graph.initializers.values())
    onnx_model(path)  # compares the module with ONNX Runtime


def test_weights_are_found_behind_the_links_of_a_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "one"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    onnx_graphs.denoiser(blobs / "model.onnx", BODY, external="model.data")
    for name in ("model.onnx", "model.data"):
        (blobs / name).rename(blobs / f"hash-of-{name}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"hash-of-{name}")
    onnx_model(snapshot / "model.onnx")


def test_weights_with_other_names_on_the_disk_are_refused(tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data")
    (tmp_path / "other").hardlink_to(tmp_path / "model.data")
    told = refused(path, "other names on this disk", "model.data with one name", "2 names")
    subprocess.run(told.partition("by a copy: ")[2], shell=True, check=True)
    onnx_model(path)


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["-1", "abc", "", "1.5", " 8", "9" * 30])
def test_places_that_are_none_are_refused(key, value, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data")

    def move(model: onnx.ModelProto) -> None:
        (tensor, *_) = [tensor for tensor in model.graph.initializer if tensor.external_data]
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value

    refused(changed(path, move), "'q_weight' lies in model.data", f"{key}: a whole number of bytes", repr(value))


@pytest.mark.parametrize("location", [None, "", "a\0b"])
def test_files_of_weights_without_a_name_are_refused(location, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data")

    def move(model: onnx.ModelProto) -> None:
        (tensor, *_) = [tensor for tensor in model.graph.initializer if tensor.external_data]
        del tensor.external_data[:]
        if location is not None:
            tensor.external_data.add(key="location", value=location)

    refused(changed(path, move), "does not name the file of the weight 'q_weight'")


def of_node(index: int, name: str):
    """Renames a node's output."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node[index].output[0] = name

    return change


@pytest.mark.parametrize(
    ("change", "name", "got"),
    [
        (of_node(3, "waves"), "waves", "Mul waves and Sin waves"),
        (of_node(3, "sample"), "sample", "an input and Sin sample"),
        (of_node(3, "q_weight"), "q_weight", "a weight and Sin q_weight"),
        (lambda model: model.graph.node[3].output.append("sines"), "sines", "Sin sines and Sin sines"),
        (lambda model: model.graph.input.append(model.graph.input[0]), "sample", "an input and another input"),
    ],
    ids=["outputs", "an input", "a weight", "one node", "inputs"],
)
def test_two_values_of_one_name_are_refused(change, name, got, tmp_path):
    path = changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), change)
    refused(path, f"two values called '{name}'", got)


@pytest.mark.parametrize("kind", [99, -3])
@pytest.mark.parametrize("place", ["input 'sample'", "output 'out_sample'", "weight 'q_weight'", "constant 'value'"])
def test_types_that_are_not_known_are_refused(kind, place, tmp_path):
    def change(model: onnx.ModelProto) -> None:
        what = place.partition(" ")[0]
        if what == "weight":
            model.graph.initializer[0].data_type = kind
        elif what == "constant":
            model.graph.node[0].attribute[0].t.data_type = kind
        else:
            getattr(model.graph, what)[0].type.tensor_type.elem_type = kind

    path = changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), change)
    refused(path, f"gives the {place}", "an unknown type", f"got: {kind}")


def of_weight(**fields):
    def change(model: onnx.ModelProto) -> None:
        for name, value in fields.items():
            if name == "dims":
                model.graph.initializer[0].dims[:] = value
            else:
                setattr(model.graph.initializer[0], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "expected", "got"),
    [
        (of_weight(raw_data=b"1234"), "16,384 bytes, as [64, 64] in FLOAT takes", "got: 4"),
        (of_weight(dims=[64, -64]), "sizes from 0", "[64, -64]"),
        (of_weight(data_type=0), "a type of ONNX", "0 (UNDEFINED)"),
        (of_weight(data_type=8), "texts in string_data", "raw bytes"),
        (lambda model: model.graph.initializer[0].ClearField("raw_data"), "4,096 numbers", "got: 0"),
    ],
    ids=["bytes", "sizes", "no type", "text", "nothing"],
)
def test_weights_that_are_not_whole_are_refused(change, expected, got, tmp_path):
    path = changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), change)
    refused(path, "'q_weight'", expected, got)


def test_weights_beside_a_graph_that_are_not_whole_are_refused(tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data")
    data = tmp_path / "model.data"
    content = data.read_bytes()
    data.write_bytes(content[:-8])
    refused(path, "are not whole", f"{len(content) - 8:,} bytes")
    data.unlink()
    refused(path, "are not whole", "no such file", "put model.data beside model.onnx")


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "link"])
def test_weights_outside_of_the_folder_are_refused(place, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = onnx_graphs.denoiser(folder / "model.onnx", BODY, external="model.data")
    (folder / "model.data").rename(tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")

    def move(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = place

    refused(changed(path, move), "lies outside the model's folder", place)


@pytest.mark.parametrize("content", ["cut", "text", "nothing"])
def test_damaged_files_are_refused(content, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no graph at all, " * 8, "nothing": b""}[content])
    refused(path, "no ONNX model, or damaged", f"{path.stat().st_size} bytes")


def test_unreadable_files_are_refused(tmp_path):
    refused(tmp_path / "none.onnx", "cannot read the model", "No such file")
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "cannot read the model")


@pytest.mark.parametrize("opset", [9, 99])
def test_unknown_opsets_are_refused(opset, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY)

    def of_opset(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = opset

    refused(changed(path, of_opset), "opset that is not supported", f"opset {opset}", "opset 11 to 26")


def test_an_old_opset_is_read_with_its_own_meanings(tmp_path, monkeypatch):
    attributes = re.sub(r"Unsqueeze\((\w+), one\)", r"Unsqueeze<axes = [1]>(\1)", onnx_graphs.HEADER)
    monkeypatch.setattr(onnx_graphs, "HEADER", attributes)
    body = plain("s = MatMul(q, kt)\np = Softmax<axis = 3>(s)")
    model = onnx_model(onnx_graphs.denoiser(tmp_path / "model.onnx", body, opset=11))
    assert model.dims == {"batch": (1, 2, 4)}


def test_control_flow_is_refused(tmp_path):
    body = BODY.replace(
        "attended = MatMul(p, v)",
        """zero = Constant<value_float = 0.0> ()
        most = ReduceMax<keepdims = 0>(s)
        large = Greater(most, zero)
        attended = If(large) <
            then_branch = yes () => (float[batch, 2, 12, 32] a) { a = MatMul(p, v) },
            else_branch = no () => (float[batch, 2, 12, 32] b) { b = Identity(v) }
        >""",
    )
    refused(
        onnx_graphs.denoiser(tmp_path / "model.onnx", body), "decides at run time", "If attended", "depends on values"
    )
    loop = BODY.replace(
        "attended = MatMul(p, v)",
        """times = Constant<value = int64 {1}> ()
        on = Constant<value = bool {1}> ()
        attended = Loop(times, on, v) <
            body = again (int64 i, bool c, float[batch, 2, 12, 32] y) => (bool c2, float[batch, 2, 12, 32] y2) {
                c2 = Identity(c)
                y2 = MatMul(p, y)
            }
        >""",
    )
    refused(onnx_graphs.denoiser(tmp_path / "loop.onnx", loop), "has loops", "Loop attended", "tracing")


def test_a_branch_that_sizes_decide_is_taken(tmp_path):
    """Exporters write such a branch for a squeeze of an axis of unknown size."""
    body = BODY.replace(
        "attended = MatMul(p, v)",
        """sizes = Shape<start = 2, end = 3>(v)
        wide = Constant<value = int64[1] {20}> ()
        many = Less(sizes, wide)
        condition = Squeeze(many)
        attended = If(condition) <
            then_branch = yes () => (float[batch, 2, n, 32] a) { a = MatMul(p, v) },
            else_branch = no () => (float[batch, 2, n, 32] b) { b = Identity(v) }
        >""",
    )
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, tokens="n")
    assert not onnx_model(path, sizes={"n": [4, 8, 12]}).left_sites
    refused(path, "decides at run time", "differs between sizes", sizes={"n": [8, 12, 24]})
    refused(path, "no attention was found", "no Softmax", sizes={"n": 32})


def test_local_functions_are_part_of_the_graph(tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY.replace("p = Softmax<axis = -1>(s)", "p = Abs(s)"))
    model = onnx.load(path)
    function = onnx.parser.parse_function(
        '<opset_import: ["" : 17], domain: "local"> soft (x) => (y) { y = Softmax<axis = -1>(x) }'
    )
    model.functions.append(function)
    node = next(node for node in model.graph.node if node.op_type == "Abs")
    node.op_type, node.domain = "soft", "local"
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    onnx.save(model, path)
    assert onnx_model(path).left_sites == ()


@pytest.mark.parametrize(
    ("calls", "circle"),
    [
        ({"f": "f"}, "local::f calls local::f"),
        ({"f": "g", "g": "h", "h": "g"}, "local::g calls local::h calls local::g"),
    ],
    ids=["itself", "a circle"],
)
def test_functions_that_call_themselves_are_refused(calls, circle, tmp_path):
    def change(model: onnx.ModelProto) -> None:
        for name, called in calls.items():
            text = (
                f'<opset_import: ["" : 17, "local" : 1], domain: "local"> {name} (x) => (y) {{ y = local.{called}(x) }}'
            )
            model.functions.append(onnx.parser.parse_function(text))
        node = next(node for node in model.graph.node if node.op_type == "Sin")
        node.op_type, node.domain = "f", "local"
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))

    path = changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), change)
    refused(path, "has a function that calls itself", f"got: {circle}")


def test_files_that_the_library_refuses_are_refused_in_its_words(tmp_path):
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[0].attribute[0].type = onnx.AttributeProto.SPARSE_TENSOR

    refused(changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), change), "Sparse tensors are not supported")


DEEP = range(1, 1500)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("first", "each", "last", "told"),
    [
        (["s0 = MatMul(q, kt)"], "s{0} = Add(s{1}, s{1})", "s = Identity(s1499)", "no product of queries and keys"),
        (["a = MatMul(q, kt)", "m0 = Sub(a, a)"], "m{0} = Mul(m{1}, m{1})", "s = Add(a, m1499)", ""),
        (
            ["a = MatMul(q, kt)", "b = Sub(a, a)", "z0 = Tanh(b)"],
            "z{0} = Mul(z{1}, z{1})",
            "z = Tanh(z1499)\ns = Add(z, a)",
            "",
        ),
    ],
    ids=["logits", "a mask", "a GELU"],
)
def test_long_chains_end(first, each, last, told, tmp_path):
    """A search that visits each of many steps twice would not end, and recursion would overflow the stack."""
    lines = [*first, *(each.format(i, i - 1) for i in DEEP), last, "p = Softmax<axis = -1>(s)"]
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", plain("\n".join(lines)))
    if told:
        refused(path, told)
    else:
        onnx_model(path)


def test_weights_that_are_inputs_are_refused(tmp_path):
    body = BODY.replace("v_weight", "given")
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, inputs=",float[64, 64] given")
    refused(path, "takes its weights as inputs", "'given' [64, 64], which MatMul", "export_params=True")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("p2 = com.microsoft.Frobnicate(p)", "com.microsoft::Frobnicate"),
        (
            "sc = Constant<value_float = 0.1> ()\nqp = QuantizeLinear(p, sc)\np2 = DequantizeLinear(qp, sc)",
            "a model that is not quantised yet",
        ),
    ],
)
def test_operators_that_are_not_known_are_named(line, told, tmp_path):
    body = BODY.replace("p = Softmax<axis = -1>(s)", f"p = Softmax<axis = -1>(s)\n{line}").replace(
        "MatMul(p, v)", "MatMul(p2, v)"
    )
    refused(onnx_graphs.denoiser(tmp_path / "model.onnx", body), "operators that are not converted", told)


def test_sizes_that_follow_values_are_refused(tmp_path):
    body = BODY.replace(
        "joined = Reshape(back, flat)",
        "j = Reshape(back, flat)\nm = ReduceMax<keepdims = 0>(j)\nw = Cast<to = 7>(m)\nten = Unsqueeze(w, one)\n"
        "joined = Expand(j, ten)",
    )
    refused(onnx_graphs.denoiser(tmp_path / "model.onnx", body), "sizes or places that depend on the inputs' values")


def test_a_graph_out_of_order_is_the_same_model(tmp_path):
    """Converters to FP16 put their casts at the end of a file."""
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY)
    in_order = onnx_model(path)

    def swap(model: onnx.ModelProto) -> None:
        nodes = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend(nodes[::-1])

    inputs = in_order.example(0, {"batch": 2})
    assert torch.equal(onnx_model(changed(path, swap)).denoiser(**inputs), in_order.denoiser(**inputs))


def test_a_graph_that_is_a_circle_is_refused(tmp_path):
    def join(model: onnx.ModelProto) -> None:
        first = next(node for node in model.graph.node if node.output[0] == "x")
        first.input[0] = "joined"

    path = changed(onnx_graphs.denoiser(tmp_path / "model.onnx", BODY), join)
    refused(path, "reads a value that nothing before it computes", "check_model")


def test_external_weights_and_conditions_are_part_of_a_models_identity(tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY, external="model.data", kind="float16")
    section = ModelSection.model_validate({"source": str(path), "options": {"conditions": "rows.npz"}})
    assert (section.source, section.weights) == ("onnx", path)
    assert with_dtype(section).dtype == "float16"
    hashes = {identity(section)}
    np.savez(tmp_path / "rows.npz", text=np.zeros((2, 3)))
    hashes.add(identity(section))
    content = (tmp_path / "model.data").read_bytes()
    (tmp_path / "model.data").write_bytes(content[:-1] + b"\x01")
    assert len(hashes | {identity(section)}) == 3


def test_a_graph_that_means_something_else_here_is_refused(tmp_path, monkeypatch):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", BODY)
    from trtconvert.models.onnx import operators

    monkeypatch.setitem(operators.OPERATORS, "Sin", operators.OPERATORS["Cos"])
    refused(path, "computes something else in ONNX Runtime", "differ by 0.001 at most")
