"""Files that are damaged, do not belong together, or are not there: every command says so, and writes nothing."""

from __future__ import annotations

import errno
import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_models import save, save_pipeline, save_shards, weights
from support import contents, refusal, run

from trtconvert.weights.sources import open_source
from trtconvert.weights.tensor_files import TensorWriter, read_entries, read_entry

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(path, header, data=b"\0" * 16, length=None):
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def refused(model, tmp_path, *parts):
    """Both commands refuse the model with the same message, and write nothing."""
    for command, output in (("analyze", "a.json"), ("quantize", "q")):
        message = refusal(run(command, model, "-o", tmp_path / output), *parts)
        assert not (tmp_path / output).exists()
    return message


def second(name="b", **changed):
    return {"a": ENTRY, name: {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]} | changed}


@pytest.mark.parametrize(
    ("header", "got"),
    [
        (second(data_offsets=[4, 12]), "offset for tensor `b`"),
        (second(data_offsets=[12, 20]), "offset for tensor `b`"),
        (second(data_offsets=[8, 24]), "invalid shape, data type, or offset"),
        ({"a": ENTRY, "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, "not fully covered"),
        ({"a": ENTRY}, "not fully covered"),
        (second(dtype="F8_E8M0", shape=[8]), "b is of the type F8_E8M0"),
        (second(dtype="F32_"), "unknown variant `F32_`"),
        (second(dtype=3), "invalid JSON in header"),
        (second(shape=[-2]), "integer `-2`"),
        (second(shape=None), "invalid type: null"),
        (second(data_offsets=[8]), "invalid length 1"),
        ({"a": 7}, "invalid type: integer `7`"),
        ({"__metadata__": {"a": 1}, **second()}, "expected a string"),
        (b'{"a": {}, "a": {}}', "'a' twice"),
        (b"[]", "not a JSON object"),
        (b"{", "Expecting"),
    ],
    ids=str,
)
def test_headers_that_do_not_fit(tmp_path, header, got):
    raw(tmp_path / "m.safetensors", header)
    refused(tmp_path / "m.safetensors", tmp_path, got, "get the file again")


def test_headers_beyond_the_limit_and_files_that_are_cut(tmp_path):
    path = tmp_path / "m.safetensors"
    raw(path, b"{}", length=10**9)
    refused(path, tmp_path, "the limit is 100000000")
    save_file({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, tmp_path, "cannot be read")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("m.bin", b"not a pickle", ("cannot be read",)),
        ("m.gguf", b"GGUF", ()),
        ("m.txt", b"", ("no file of weights", "with .safetensors")),
        ("m.safetensors", b"version https://git-lfs/spec/v1\n", ("Git LFS", "git lfs pull")),
    ],
    ids=str,
)
def test_other_files(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, tmp_path, *parts)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_code_in_a_file_is_executed(tmp_path):
    torch.save({"a": torch.ones(2), "b": Evil(str(tmp_path / "ran"))}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", tmp_path, "holds more than weights", "mkdir")
    assert not (tmp_path / "ran").exists()


def test_tensors_of_torch_that_are_no_plain_ones(tmp_path):
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", tmp_path, "a in", "sparse")
    torch.save({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", tmp_path, "complex64")
    torch.save({"__metadata__": torch.zeros(2)}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", tmp_path, "a name that safetensors files cannot have")


def test_places_without_a_model(tmp_path):
    refused(tmp_path / "nothing", tmp_path, "there is no model at", "nothing of this name")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "there are no weights in")
    (tmp_path / "empty" / "readme.md").write_text("")
    refused(tmp_path / "empty", tmp_path, "readme.md")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", tmp_path, "something else")


def test_folders_that_may_not_be_read(tmp_path, monkeypatch):
    save_pipeline(tmp_path / "p")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("trtconvert.weights.sources.stored_weights", refuse)
    refused(tmp_path / "p", tmp_path, "p cannot be read", "Permission denied")


def test_shards_that_do_not_belong_together(tmp_path):
    model = save_shards(tmp_path / "m", weights())
    first = model / "model-00001-of-00002.safetensors"
    index = model / "model.safetensors.index.json"
    said = index.read_text(encoding="utf-8")
    for wrong, part in (
        ("{}", "no mapping of tensors"),
        ("[1", "cannot be read"),
        (said.replace(first.name, "../x.safetensors"), "outside of the folder"),
    ):
        index.write_text(wrong, encoding="utf-8")
        refused(model, tmp_path, str(index), part)
    index.write_text(said.replace('"scalar"', '"vector"'), encoding="utf-8")
    refused(model, tmp_path, "does not fit the files beside it", "vector")
    index.write_text(said, encoding="utf-8")
    content = first.read_bytes()
    first.unlink()
    refused(model, tmp_path, "a shard that", f"no {first.name}")
    first.write_bytes(content)
    save_file({"steps": torch.arange(5)}, model / "model-00003-of-00003.safetensors")
    refused(model, tmp_path, "two files have the tensor steps", "move the other away")


def test_shards_without_an_index_are_counted_by_their_names(tmp_path):
    model = save_shards(tmp_path / "m", weights(), 3)
    (model / "model.safetensors.index.json").unlink()
    assert len(open_source(model).parts[0].files) == 3
    lost = model / "model-00002-of-00003.safetensors"
    lost.unlink()
    refused(model, tmp_path, "shards of model are missing", "3 files", "model-00001-of-00003")
    open_source(model / "model-00001-of-00003.safetensors")  # named by itself, it is what is meant


def test_an_index_alone_names_its_shards(tmp_path):
    """Files may have any name that the index says."""
    (tmp_path / "m").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "m" / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "m" / "other.safetensors")
    (tmp_path / "m" / "one.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert [path.name for path in open_source(tmp_path / "m").parts[0].files] == ["one.safetensors"]
    (tmp_path / "m" / "one.safetensors").unlink()
    refused(tmp_path / "m", tmp_path, "a shard that", "no one.safetensors")


def test_variants_without_a_plain_one(tmp_path):
    (tmp_path / "m").mkdir()
    for variant in ("fp16", "ema"):
        save_file({"a": torch.ones(2)}, tmp_path / "m" / f"model.{variant}.safetensors")
    refused(tmp_path / "m", tmp_path, "several variants", "ema, fp16", "name the file itself")
    assert run("quantize", tmp_path / "m" / "model.fp16.safetensors", "-o", tmp_path / "q").exit_code == 0


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        (
            {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3)},
            "[4, 4] with scales [3]",
        ),
        ({"a.weight": torch.ones(4, 4), "a.weight_scale": torch.full((4,), 2.0)}, "a scale of a.weight"),
        ({"a.weight": torch.ones(4, 4, dtype=torch.uint8), "a.weight.absmax": torch.ones(1)}, "a part of quantised"),
        ({"a.weight": torch.ones(4, 4, dtype=torch.int8)}, "a.weight: int8"),
    ],
    ids=["scales", "scaled", "bitsandbytes", "integers"],
)
def test_quantised_otherwise(tmp_path, tensors, part):
    save(tmp_path / "m", tensors)
    refused(tmp_path / "m", tmp_path, "cannot be undone here", part)


def test_fingerprints_tell_models_apart_and_not_places(tmp_path):
    one = open_source(save(tmp_path / "a", weights(0))).fingerprint
    assert open_source(save(tmp_path / "b", weights(0))).fingerprint == one
    assert open_source(save(tmp_path / "c", weights(1))).fingerprint != one
    pipeline = open_source(save_pipeline(tmp_path / "p"))
    assert [part.folder for part in pipeline.parts] == ["text_encoder", "transformer"]
    assert len({tensor.path for tensor in pipeline.tensors}) == 2 * len(weights())


def test_source_files_are_read_as_they_are(tmp_path):
    """Odd sizes, no dimensions, no elements, names beyond ASCII."""
    before = weights()
    save(tmp_path / "m", before)
    source = contents(tmp_path / "m")
    got = {tensor.name: tensor.read() for tensor in open_source(tmp_path / "m").tensors}
    assert got.keys() == before.keys() and all(torch.equal(got[name], x) for name, x in before.items())
    assert contents(tmp_path / "m") == source


def test_the_writer_writes_what_the_library_reads(tmp_path):
    """Tensors of odd sizes between others would move the others to places that readers refuse."""
    tensors = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.arange(5, dtype=torch.float32),
        "c": torch.arange(7, dtype=torch.bfloat16),
        "d": torch.arange(4, dtype=torch.float64).reshape(2, 2).T,
        "e": torch.tensor(True),
        "f": torch.zeros(3, 0),
        "g": torch.arange(3, dtype=torch.int64),
    }
    with TensorWriter(tmp_path / "x.safetensors", tensors, 100) as writer:
        for name, x in tensors.items():
            writer.add(name, x, x.dtype)
        writer.close({"it": "says"})
    got = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(got[name], x) for name, x in tensors.items())
    entries, metadata = read_entries(tmp_path / "x.safetensors")
    assert metadata == {"it": "says"}
    begin = 8 + struct.unpack("<Q", (tmp_path / "x.safetensors").read_bytes()[:8])[0]
    assert begin % 8 == 0
    for entry in entries:
        assert entry.start % entry.dtype.itemsize == 0
        assert torch.equal(read_entry(tmp_path / "x.safetensors", entry), tensors[entry.name])
