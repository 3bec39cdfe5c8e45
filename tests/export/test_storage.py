"""External weights: loading models, and the input of parsers with joined weights."""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exports import run_from_root
from support import files_of_at_most

from trtconvert.errors import UserError
from trtconvert.export import storage

GENERATOR = np.random.default_rng(0)
X, KEPT, JOINED, BIAS = (GENERATOR.standard_normal(shape, np.float32) for shape in ((2, 64), (64, 48), (48, 99), (99,)))


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder of temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def stored(folder: Path, location: str = "model.onnx.data") -> Path:
    """The file of x [2, 64] @ KEPT, with the weight beside it."""
    x, kept = ir.val("x", ir.DataType.FLOAT, (2, 64)), ir.val("kept", const_value=ir.tensor(KEPT, name="kept"))
    product = ir.node("MatMul", [x, kept])
    graph = ir.Graph([x], product.outputs, nodes=[product], initializers=[kept], opset_imports={"": 20}, name="g")
    graph.outputs[0].dtype, graph.outputs[0].shape = ir.DataType.FLOAT, ir.Shape((2, 48))
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    ir.save(ir.Model(graph, ir_version=10), folder / "model.onnx", external_data=location)
    return folder / "model.onnx"


def extended(model: ir.Model, *more: Callable[[], np.ndarray]) -> ir.Model:
    """The model of `stored`, extended by @ JOINED + BIAS with lazy weights.

    Args:
        more: further weights [48, 99], which are added to JOINED.
    """
    graph = model.graph
    computed = {"joined": lambda: JOINED, "bias": lambda: BIAS}
    computed |= {f"more {index}": array for index, array in enumerate(more)}
    weights = []
    for name, array in computed.items():
        shape = ir.Shape(BIAS.shape if name == "bias" else JOINED.shape)
        tensor = ir.LazyTensor(lambda array=array: ir.Tensor(array()), ir.DataType.FLOAT, shape, name=name)
        weights.append(ir.val(name, const_value=tensor))
        graph.register_initializer(weights[-1])
    total, bias, *others = weights
    for other in others:
        graph.append(ir.node("Add", [total, other]))
        total = graph[-1].outputs[0]
    graph.append(ir.node("MatMul", [graph.outputs[0], total]))
    graph.append(ir.node("Add", [graph[-1].outputs[0], bias]))
    graph.outputs[:] = graph[-1].outputs
    graph.outputs[0].dtype, graph.outputs[0].shape = ir.DataType.FLOAT, ir.Shape((2, 99))
    return model


def expected(*more: np.ndarray) -> np.ndarray:
    return X @ KEPT @ sum(more, JOINED) + BIAS


def places(content: bytes) -> dict[str, dict[str, str]]:
    """File, offset and length of the weights of a serialized model that are in files, by name."""
    found = onnx.ModelProto.FromString(content).graph.initializer
    return {x.name: {e.key: e.value for e in x.external_data} for x in found if x.external_data}


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    """Sizes and times of all files and folders."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))}


# For a parser -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [ir.load, storage.load])
@pytest.mark.parametrize("location", ["model.onnx.data", "a folder/of/weights.data"])
def test_joined_weights_are_read_from_a_file_like_the_rest(tmp_path, temporary, location, load):
    path = stored(tmp_path / "bundle", location)
    with storage.for_parser(extended(load(path))) as content:
        where = places(content)
        assert set(where) == {"kept", "joined"}  # a bias of 396 bytes stays in the graph
        assert storage.ROOT / where["kept"]["location"] == path.parent / location
        assert (storage.ROOT / where["joined"]["location"]).is_relative_to(temporary)
        np.testing.assert_allclose(run_from_root(content, {"x": X}), expected(), rtol=1e-4, atol=1e-4)
    assert not list(temporary.iterdir())


def test_a_path_from_where_the_program_runs_and_a_link_on_the_way(tmp_path, monkeypatch):
    stored(tmp_path / "bundle")
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deeper" / "link").symlink_to(tmp_path / "bundle")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deeper")
    monkeypatch.chdir(tmp_path / "bundle")
    for folder in ("", "../bundle", "../link/link", "../link/../deeper/link"):
        for load in (ir.load, storage.load):
            with storage.for_parser(extended(load(Path(folder, "model.onnx")))) as content:
                assert storage.ROOT / places(content)["kept"]["location"] == tmp_path / "bundle" / "model.onnx.data"


def test_offsets_are_pages(tmp_path):
    more = [lambda: JOINED] * 3
    with storage.for_parser(extended(storage.load(stored(tmp_path)), *more)) as content:
        offsets = [int(where["offset"]) for name, where in places(content).items() if name != "kept"]
        assert len(offsets) == 4 and [offset % 4096 for offset in offsets] == [0] * 4 and JOINED.nbytes % 4096
        np.testing.assert_allclose(
            run_from_root(content, {"x": X}), expected(JOINED, JOINED, JOINED), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("at_once", [1, 3])
def test_weights_that_are_computed_at_once_fit_a_limit(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(storage, "_BYTES_AT_ONCE", at_once * JOINED.nbytes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    made, most = [], []

    def compute():
        array = JOINED.copy()
        made.append(weakref.ref(array))
        time.sleep(0.02)
        most.append(sum(array() is not None for array in made))
        return array

    with storage.for_parser(extended(storage.load(stored(tmp_path)), *[compute] * 12)):
        assert len(made) == 12 and max(most) <= at_once


def test_the_model_stays_as_it_is(tmp_path):
    model = extended(storage.load(stored(tmp_path)))
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    with storage.for_parser(model):
        pass
    assert {name: value.const_value for name, value in model.graph.initializers.items()} == before


def test_models_that_hold_their_weights_are_serialized_as_they_are(tmp_path, temporary):
    model = extended(ir.from_proto(onnx.load(stored(tmp_path))))
    with storage.for_parser(model) as content:
        assert content == ir.to_proto(model).SerializeToString() and not list(temporary.iterdir())


def test_too_much_for_one_message_goes_to_a_file_though_nothing_else_does(tmp_path, temporary, monkeypatch):
    model = extended(ir.from_proto(onnx.load(stored(tmp_path))))
    held = KEPT.nbytes + JOINED.nbytes + BIAS.nbytes
    for limit, names in ((held, set()), (held - 1, {"kept", "joined"})):
        monkeypatch.setattr(storage, "INLINE_LIMIT", limit)
        with storage.for_parser(model) as content:
            assert set(places(content)) == names
            np.testing.assert_allclose(run_from_root(content, {"x": X}), expected(), rtol=1e-4, atol=1e-4)


# What is left -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_not_written(tmp_path, temporary):
    path = stored(tmp_path / "bundle")
    path.parent.chmod(0o555)
    try:
        before = state(path.parent)
        with storage.for_parser(extended(storage.load(path))) as content:
            assert len(places(content)) == 2 and state(path.parent) == before
    finally:
        path.parent.chmod(0o755)
    assert state(path.parent).keys() == before.keys()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["while weights are written", "while the parser runs"])
def test_early_ends_leave_nothing_behind(tmp_path, temporary, failure, when):
    def compute():
        assert list(temporary.iterdir())
        if when == "while weights are written":
            raise failure
        return JOINED

    model = extended(storage.load(stored(tmp_path / "bundle")), compute)
    with pytest.raises(failure), storage.for_parser(model):
        assert when == "while the parser runs" and list(temporary.iterdir())
        raise failure
    assert not list(temporary.iterdir())


def refused(model: ir.Model) -> str:
    with pytest.raises(UserError) as error, storage.for_parser(model):
        pass
    return str(error.value)


@pytest.mark.parametrize(("cores", "reason"), [(1, "requested and "), (8, os.strerror(errno.EFBIG))])
def test_a_disk_without_room_is_named_with_what_helps(tmp_path, temporary, monkeypatch, cores, reason):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    model = extended(storage.load(stored(tmp_path / "bundle")), *[lambda: JOINED] * 99)
    with files_of_at_most(100_000):
        message = refused(model)
    for part in (f"written to {temporary}", "expected: 2 MiB of free space", reason, "MiB free", "TMPDIR"):
        assert part in message
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_other_failures_to_write_are_not_called_a_full_disk(tmp_path, temporary, number):
    def fail():
        raise OSError(number, os.strerror(number))

    model = extended(storage.load(stored(tmp_path / "bundle")), fail)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)), storage.for_parser(model):
            pass
    else:
        assert f"got: {os.strerror(number)}, " in refused(model)
    assert not list(temporary.iterdir())


# Reading ----------------------------------------------------------------------------------------------------------------


def test_files_with_a_second_name_are_read(tmp_path):
    """`compile` makes hard links of a bundle's files."""
    path = stored(tmp_path)
    os.link(storage.weights_file(path), tmp_path / "second name")
    np.testing.assert_array_equal(storage.load(path).graph.initializers["kept"].const_value.numpy(), KEPT)
    with storage.for_parser(extended(storage.load(path))) as content:
        np.testing.assert_allclose(run_from_root(content, {"x": X}), expected(), rtol=1e-4, atol=1e-4)


def test_weights_are_found_after_the_program_went_elsewhere(tmp_path, monkeypatch):
    stored(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = storage.load(Path("model.onnx"))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(model.graph.initializers["kept"].const_value.numpy(), KEPT)


@pytest.mark.parametrize("location", ["../secret", "a/../../secret", "/etc/hostname"])
def test_weights_outside_the_folder_are_refused(tmp_path, location):
    path = stored(tmp_path / "bundle")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(
        UserError, match=rf"'kept' lies outside(?s:.*)expected: .*bundle(?s:.*)got: {location}"
    ) as error:
        storage.load(path)
    assert error.value.remedy
