"""`trtconvert quantize` and `dequantize`: the output by input files and options, and the remains of a kill."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import IN_FP32, IN_INT8, save, save_pipeline, save_shards, weights
from support import contents, environment, files_of_at_most, finish, handled, refusal, run, start

from trtconvert.linear.reference import quantise_weight
from trtconvert.weights import blocks, conversion, tensor_files
from trtconvert.weights.weight_files import read_tensors

MODEL = "diffusion_pytorch_model.safetensors"


def made(model, out, *options, name=MODEL):
    outcome = run("quantize", model, "-o", out, *options)
    assert outcome.exit_code == 0, outcome.output
    return load_file(out / name)


def test_written_tensors_and_types(tmp_path):
    before = weights()
    source = contents(save(tmp_path / "m", before))
    got = made(tmp_path / "m", tmp_path / "q")
    assert {name for name, x in got.items() if x.dtype == torch.int8} == IN_INT8
    assert got.keys() - before.keys() == {f"{name}_scale" for name in IN_INT8}
    for name, x in before.items():
        if name in IN_INT8:
            scale = got[f"{name}_scale"]
            assert tuple(scale.shape) == blocks.block_shape(x.shape[0], x[0].numel())
            back = blocks.dequantise(got[name], scale, torch.float32)
            assert float((back - x.float()).norm() / x.float().norm()) < 0.012
        else:
            wanted = torch.float32 if name in IN_FP32 else x.dtype
            assert got[name].dtype == wanted and torch.equal(got[name], x.to(wanted))
    assert contents(tmp_path / "m") == source
    assert (tmp_path / "q" / "config.json").read_text() == '{"a": 1}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]
    with safe_open(tmp_path / "q" / MODEL, "pt") as file:
        said = json.loads(file.metadata()["trtconvert"])
        assert file.metadata()["format"] == "pt"
    assert said["granularity"] == "block" and said["tensors"]["x_embedder.weight"]["original"] == "bfloat16"


def test_the_files_alone_are_enough_to_dequantise(tmp_path):
    """By the command, and by the reader of recipes."""
    before = weights()
    save(tmp_path / "m", before)
    made(tmp_path / "m", tmp_path / "q")
    (tmp_path / "alone").mkdir()
    (tmp_path / "q" / MODEL).rename(tmp_path / "alone" / "x.safetensors")
    assert run("dequantize", tmp_path / "alone" / "x.safetensors", "-o", tmp_path / "d").exit_code == 0
    got, read = load_file(tmp_path / "d" / "x.safetensors"), read_tensors([tmp_path / "alone" / "x.safetensors"])
    assert got.keys() == before.keys() == read.keys()
    for name, x in before.items():
        assert got[name].dtype == x.dtype
        if name in IN_INT8:
            assert torch.equal(read[name].to(x.dtype), got[name])
        else:
            assert torch.equal(got[name], x)
    with safe_open(tmp_path / "d" / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("options", "dtype"), [((), torch.bfloat16), (("--dtype", "fp16"), torch.float16)], ids=str)
def test_fp32_becomes_16_bits_again(tmp_path, options, dtype):
    save(tmp_path / "m", weights(dtype=torch.float32))
    made(tmp_path / "m", tmp_path / "q")
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "d", *options).exit_code == 0
    got = load_file(tmp_path / "d" / MODEL)
    assert {got[name].dtype for name in IN_INT8} == {dtype}
    assert got["blocks.0.norm1.weight"].dtype == torch.float32  # it had never another type
    assert got["blocks.0.attn.qkv.bias"].dtype == dtype


def test_granularity_of_channels_gives_what_engines_store(tmp_path):
    before = weights()
    save(tmp_path / "m", before)
    got = made(tmp_path / "m", tmp_path / "q", "--granularity", "channel")
    for name in IN_INT8:
        stored, scale = quantise_weight(before[name])
        assert torch.equal(got[name], stored) and torch.equal(got[f"{name}_scale"], scale)


@pytest.mark.parametrize(
    ("options", "name", "dtype"),
    [
        (("--fp32", "*.mlp.*"), "blocks.0.mlp.fc1.weight", torch.float32),
        (("--fallback-dtype", "fp16"), "blocks.0.attn.qkv.bias", torch.float16),
        (("--max-outliers", "0"), "blocks.0.attn.qkv.weight", torch.bfloat16),
        (("--min-elements", "60000"), "blocks.1.conv.weight", torch.bfloat16),
        (("--min-elements", "64"), "small.weight", torch.int8),
    ],
    ids=str,
)
def test_every_option_decides(tmp_path, options, name, dtype):
    tensors = weights()
    tensors["blocks.0.attn.qkv.weight"][0, 0] = 1.0  # one outlier
    save(tmp_path / "m", tensors)
    assert made(tmp_path / "m", tmp_path / "q")[name].dtype != dtype
    assert made(tmp_path / "m", tmp_path / "with", *options)[name].dtype == dtype


def test_weights_that_int8_would_spoil_stay(tmp_path):
    """One weight of a thousand times the others' size leaves zeros of the rest of its block, though outliers are few."""
    tensors = weights()
    spoiled = torch.full((128, 128), 1e-3)
    spoiled[0, 0] = 0.2
    save(tmp_path / "m", tensors | {"spoiled.weight": spoiled.bfloat16()})
    assert made(tmp_path / "m", tmp_path / "q")["spoiled.weight"].dtype == torch.bfloat16


def test_numbers_beyond_fp16_stay_in_fp32(tmp_path):
    save(tmp_path / "m", weights() | {"large.bias": torch.tensor([1e5, 1.0]).bfloat16()})
    got = made(tmp_path / "m", tmp_path / "q", "--fallback-dtype", "fp16")
    assert torch.equal(got["large.bias"], torch.tensor([1e5, 1.0]).bfloat16().float())
    refusal(
        run("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "fp16"),
        "large.bias does not fit FP16",
        "bf16",
    )
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "bf16").exit_code == 0


@pytest.mark.parametrize("size", [1e-5, 1e-26, 1e-37])
@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_small_weights_have_small_scales(tmp_path, size, granularity):
    x = (torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    save(tmp_path / "m", {"tiny.weight": x})
    got = made(tmp_path / "m", tmp_path / "q", "--granularity", granularity)
    back = blocks.dequantise(got["tiny.weight"], got["tiny.weight_scale"], torch.float64)
    error = float((back - x.double()).norm() / x.double().norm())
    with safe_open(tmp_path / "q" / MODEL, "pt") as file:
        said = json.loads(file.metadata()["trtconvert"])["tensors"]["tiny.weight"]
    assert got["tiny.weight"].dtype == torch.int8 and error < 0.012
    assert said["relative_error"] == pytest.approx(error, rel=1e-3)
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "d").exit_code == 0
    again = load_file(tmp_path / "d" / MODEL)["tiny.weight"].double()
    assert float((again - x.double()).norm() / x.double().norm()) < 0.012


def test_numbers_below_fp16_stay_in_fp32(tmp_path):
    small = torch.tensor([1e-9, -3e-10]).bfloat16()
    save(tmp_path / "m", weights() | {"small.bias": small})
    got = made(tmp_path / "m", tmp_path / "q", "--fallback-dtype", "fp16")
    assert torch.equal(got["small.bias"], small.float())
    assert got["blocks.0.attn.qkv.bias"].dtype == torch.float16


def test_shards_have_an_index(tmp_path, monkeypatch):
    before = weights()
    save_shards(tmp_path / "m", before)
    monkeypatch.setattr(conversion, "SHARD_BYTES", 400_000)
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q").exit_code == 0
    files = sorted(path.name for path in (tmp_path / "q").glob("*.safetensors"))
    assert (
        files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 1
    )
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        assert load_file(tmp_path / "q" / file).keys() == {n for n, f in index["weight_map"].items() if f == file}
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "d").exit_code == 0
    got = read_tensors(sorted((tmp_path / "d").glob("*.safetensors")))
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in before.items()}


def test_pipelines_keep_their_folders(tmp_path):
    save_pipeline(tmp_path / "p")
    save_file({"a": torch.ones(2)}, tmp_path / "p" / "transformer" / "diffusion_pytorch_model.fp16.safetensors")
    outcome = run("quantize", tmp_path / "p", "-o", tmp_path / "q")
    assert outcome.exit_code == 0 and "left out" in outcome.output
    assert set(contents(tmp_path / "q")) == {
        "model_index.json",
        "transformer/config.json",
        f"transformer/{MODEL}",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/vocab.json",
    }
    assert load_file(tmp_path / "q/text_encoder/model.safetensors")["blocks.0.mlp.fc1.weight"].dtype == torch.int8


@pytest.mark.filterwarnings("error")  # of parameters, which take gradients
def test_torch_files_with_tied_tensors(tmp_path):
    tensors = weights()
    tensors["tied.weight"] = tensors["blocks.0.mlp.fc1.weight"]
    tensors["transposed.weight"] = tensors["blocks.0.attn.qkv.weight"].T
    (tmp_path / "m").mkdir()
    tensors["parameter.weight"] = torch.nn.Parameter(tensors["tied.weight"])
    torch.save({"state_dict": tensors}, tmp_path / "m" / "pytorch_model.bin")
    got = made(tmp_path / "m", tmp_path / "q", name="model.safetensors")
    for part in ("", "_scale"):
        for name in ("tied", "parameter"):
            assert torch.equal(got[f"{name}.weight{part}"], got[f"blocks.0.mlp.fc1.weight{part}"])
    assert torch.equal(got["transposed.weight"], got["blocks.0.attn.qkv.weight"].T)


def test_fp8_is_multiplied_by_its_scales(tmp_path):
    stored = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    save(tmp_path / "m", weights() | {"a.weight": stored, "a.scale_weight": torch.tensor(0.25)})
    got = made(tmp_path / "m", tmp_path / "q")
    assert "a.scale_weight" not in got
    back = blocks.dequantise(got["a.weight"], got["a.weight_scale"], torch.float32)
    assert float((back - stored.float() / 4).norm() / (stored.float() / 4).norm()) < 0.012


@pytest.mark.parametrize("fallback", ["bf16", "fp16"])
def test_biases_in_fp8_take_the_other_type(tmp_path, fallback):
    bias = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    save(tmp_path / "m", weights() | {"a.bias": bias})
    assert run("analyze", tmp_path / "m", "-o", tmp_path / "analysis.json").exit_code == 0
    got = made(tmp_path / "m", tmp_path / "q", "--fallback-dtype", fallback)["a.bias"]
    assert got.itemsize == 2 and torch.equal(got.float(), bias.float())


def gguf_file(path, x, **fields):
    """A GGUF file with one tensor, `a.weight`. fields: of its metadata, by the writer's methods `add_…`."""
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    writer = gguf.GGUFWriter(path, "wan")
    kind = gguf.GGMLQuantizationType.Q8_0
    for method, value in fields.items():
        getattr(writer, method)("comfy.gguf.orig_shape.a.weight", value)
    writer.add_tensor("a.weight", gguf.quants.quantize(x.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_is_read(tmp_path):
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0))
    got = made(gguf_file(tmp_path / "m.gguf", x), tmp_path / "q", name="m.safetensors")
    back = blocks.dequantise(got["a.weight"], got["a.weight_scale"], torch.float32)
    assert back.shape == x.shape and float((back - x).norm() / x.norm()) < 0.02


def test_gguf_says_which_shape_a_tensor_had(tmp_path):
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0))
    file = gguf_file(tmp_path / "m.gguf", x, add_array=[96, 64, 2, 2])
    assert made(file, tmp_path / "q", name="m.safetensors")["a.weight"].shape == (96, 64, 2, 2)


@pytest.mark.parametrize("command", ["quantize", "analyze"])
@pytest.mark.parametrize(
    ("method", "value", "got"),
    [
        ("add_array", [256, 95], "[256, 95]"),
        ("add_array", [256, 96, 3], "[256, 96, 3]"),
        ("add_array", [-256, -96], "[-256, -96]"),
        ("add_array", [256, 0], "[256, 0]"),
        ("add_array", [256.0, 96.0], "array of float32"),
        ("add_array", ["256", "96"], "array of string"),
        ("add_array", [True, False], "array of bool"),
        ("add_string", "256, 96", "string"),
        ("add_float32", float("nan"), "float32"),
        ("add_int32", 7, "[7]"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_a_gguf_tensor_are_refused(tmp_path, command, method, value, got):
    file = gguf_file(tmp_path / "m.gguf", torch.ones(256, 96), **{method: value})
    outcome = run(command, file, "-o", tmp_path / "out.json")
    refusal(outcome, "a.weight does not fit it", "product is 24,576", f"got: {got}", "orig_shape")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_error_that_nobody_foresaw_leaves_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(blocks, "quantise", broken)
    save(tmp_path / "m", weights())
    outcome = run("quantize", tmp_path / "m", "-o", tmp_path / "out")
    assert outcome.exit_code not in (0, 2) and "broken" in outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_analysis_decides(tmp_path):
    save(tmp_path / "m", weights())
    assert run("analyze", tmp_path / "m", "-o", tmp_path / "a.json").exit_code == 0
    plain = made(tmp_path / "m", tmp_path / "plain")
    got = made(tmp_path / "m", tmp_path / "q", "--analysis", tmp_path / "a.json")
    assert got.keys() == plain.keys() and all(torch.equal(got[name], x) for name, x in plain.items())
    # What it says is taken, and not measured again.
    said = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    next(t for t in said["tensors"] if t["name"] == "blocks.0.mlp.fc1.weight")["outliers"] = 0.5
    (tmp_path / "b.json").write_text(json.dumps(said), encoding="utf-8")
    changed = made(tmp_path / "m", tmp_path / "c", "--analysis", tmp_path / "b.json")
    assert changed["blocks.0.mlp.fc1.weight"].dtype == torch.bfloat16


def test_an_analysis_of_another_model_is_refused(tmp_path):
    save(tmp_path / "m", weights(0))
    save(tmp_path / "other", weights(1))
    assert run("analyze", tmp_path / "other", "-o", tmp_path / "a.json").exit_code == 0
    call = ("quantize", tmp_path / "m", "-o", tmp_path / "q", "--analysis", tmp_path / "a.json")
    refusal(run(*call), "of another model", f"trtconvert analyze {tmp_path / 'm'}")
    (tmp_path / "a.json").write_text('{"tensors": 1}')
    refusal(run(*call), "the analysis", "cannot be read")
    (tmp_path / "a.json").write_text("{")
    refusal(run(*call), "cannot be read")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("end", "code"), [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "no space"), 2), (MemoryError(), 1)]
)
def test_a_killed_run_goes_on(tmp_path, monkeypatch, end, code):
    save_shards(tmp_path / "m", weights())
    monkeypatch.setattr(conversion, "SHARD_BYTES", 200_000)
    wanted = tmp_path / "wanted"
    assert run("quantize", tmp_path / "m", "-o", wanted).exit_code == 0
    written = []
    write = conversion._write

    def killed(shard, path, *rest):
        if len(written) == 2:
            raise end
        written.append(path.name)
        return write(shard, path, *rest)

    monkeypatch.setattr(conversion, "_write", killed)
    outcome = run("quantize", tmp_path / "m", "-o", tmp_path / "q")
    assert outcome.exit_code == code and "goes on from there" in " ".join(outcome.output.split())
    assert not (tmp_path / "q").exists()
    monkeypatch.setattr(conversion, "_write", lambda *args: written.append(args[1].name) or write(*args))
    outcome = run("quantize", tmp_path / "m", "-o", tmp_path / "q")
    assert outcome.exit_code == 0 and "2 of" in outcome.output
    assert len(written) == len(set(written)) > 2
    assert contents(tmp_path / "q") == contents(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q", "wanted"]


def test_an_interrupt_before_anything_is_finished_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "m", weights())

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_files.TensorWriter, "close", stopped)
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q").exit_code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_another_request_does_not_take_what_a_killed_run_left(tmp_path, monkeypatch):
    save_shards(tmp_path / "m", weights())
    monkeypatch.setattr(conversion, "SHARD_BYTES", 200_000)
    link = conversion.link_files

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "link_files", stopped)
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q").exit_code == 130
    monkeypatch.setattr(conversion, "link_files", link)
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q", "--granularity", "channel").exit_code == 0
    scales = [
        x for file in (tmp_path / "q").glob("*.safetensors") for n, x in load_file(file).items() if n[-6:] == "_scale"
    ]
    assert {x.dim() for x in scales} == {1}


def test_a_process_that_is_killed_leaves_nothing_that_looks_finished(tmp_path):
    tensors = {f"l{i}.weight": torch.randn(1024, 1024) for i in range(24)}
    save(tmp_path / "m", tensors)
    with handled(signal.SIGINT, signal.default_int_handler):
        process = start("quantize", tmp_path / "m", "-o", tmp_path / "q")
    ends = time.monotonic() + 60
    while not (tmp_path / ".q.unfinished").exists() and time.monotonic() < ends and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    finish(process)
    assert not (tmp_path / "q").exists()
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_as_the_output_takes_its_place_leaves_nothing_else(tmp_path, moment):
    """Once the output is there, a second run refuses, and does not remove the finished files."""
    save(tmp_path / "m", weights())
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "wanted").exit_code == 0
    code = f"""
        import os, signal
        from trtconvert import cli, files

        replace = files._replace_folder

        def killed(partial, target):
            if {moment == "after"}:
                replace(partial, target)
            os.kill(os.getpid(), signal.SIGKILL)

        files._replace_folder = killed
        cli.main(["quantize", "m", "-o", "q"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "q").exists() == (moment == "after")
    if moment == "before":
        assert run("quantize", tmp_path / "m", "-o", tmp_path / "q").exit_code == 0
    assert contents(tmp_path / "q") == contents(tmp_path / "wanted")
    left = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert left == {"m", "q", "wanted"}


def test_changes_on_disk_are_found(tmp_path, monkeypatch):
    save(tmp_path / "m", weights())
    place = tensor_files.TensorWriter._verify

    def damaged(writer):
        with writer._path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        place(writer)

    monkeypatch.setattr(tensor_files.TensorWriter, "_verify", damaged)
    outcome = run("quantize", tmp_path / "m", "-o", tmp_path / "q")
    assert outcome.exit_code == 1 and "was not written correctly" in outcome.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_full_disk_leaves_nothing(tmp_path):
    source = contents(save(tmp_path / "m", weights()))
    with files_of_at_most(100_000):
        refusal(run("quantize", tmp_path / "m", "-o", tmp_path / "q"), "the disk is full", "free some space")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert contents(tmp_path / "m") == source


def test_places_that_cannot_be_the_output(tmp_path):
    model = save(tmp_path / "m", weights())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("")
    refusal(run("quantize", model, "-o", tmp_path / "there"), "is there already", "another place with -o")
    refusal(run("quantize", model, "-o", tmp_path / "there" / "x"), "is there already")
    refusal(run("quantize", model, "-o", model / "q"), "within each other")
    refusal(run("quantize", model, "-o", tmp_path / "m"), "is there already")
    (tmp_path / "empty").mkdir()
    assert run("quantize", model, "-o", tmp_path / "empty").exit_code == 0
    refusal(run("quantize", tmp_path / "empty", "-o", tmp_path / "again"), "quantised already", "trtconvert dequantize")
    refusal(run("dequantize", model, "-o", tmp_path / "d"), "nothing to dequantise", "trtconvert quantize")
    refusal(run("quantize", model, "-o", tmp_path / "p", "--fp32", "nobody*"), "matches no tensor")
    refusal(run("quantize", model, "-o", tmp_path / "p", "--max-outliers", "nan"), "--max-outliers is not a number")


def test_links_to_files_and_folders_are_followed_and_stay(tmp_path):
    """As in download caches, and in pipelines that share parts."""
    model, shared = save_pipeline(tmp_path / "m"), tmp_path / "shared"
    shared.mkdir()
    wanted = {name for name in contents(model) if not name.endswith(".safetensors")}
    for name in ("text_encoder", "tokenizer"):
        (model / name).rename(shared / name)
        (model / name).symlink_to(Path("..", "shared", name))
    for path in (model / "transformer").iterdir():
        path.rename(shared / path.name)
        path.symlink_to(Path("..", "..", "shared", path.name))
    (model / "itself").symlink_to(model)
    (shared / "tokenizer" / "back").symlink_to(model)
    before = contents(shared)
    made(model, tmp_path / "q", name=Path("transformer", MODEL))
    after = [path for path in (tmp_path / "q").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "q")) for path in after if path.suffix != ".safetensors"} == wanted
    assert not any(path.is_symlink() for path in after) and contents(shared) == before


def test_files_beside_that_cannot_be_read(tmp_path, monkeypatch):
    save(tmp_path / "m", weights())

    def refuse(path, _):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(conversion.shutil, "copy2", refuse)
    refusal(run("quantize", tmp_path / "m", "-o", tmp_path / "q"), "config.json cannot be copied", "Permission denied")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(tmp_path, bad):
    tensors = weights()
    tensors["blocks.0.mlp.fc1.weight"][7, 8] = bad
    save(tmp_path / "m", tensors | {"mask": torch.tensor([0, -torch.inf])})
    refusal(run("quantize", tmp_path / "m", "-o", tmp_path / "q"), "blocks.0.mlp.fc1.weight is damaged", "1 of 60900")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_damaged_scales_are_not_taken_back(tmp_path):
    save(tmp_path / "m", weights())
    made(tmp_path / "m", tmp_path / "q")
    file, name = tmp_path / "q" / MODEL, "blocks.0.mlp.fc1.weight"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors[f"{name}_scale"][0, 0] = torch.nan
    save_file(tensors, file, metadata)
    refusal(run("dequantize", tmp_path / "q", "-o", tmp_path / "d"), f"the weight {name} is damaged", "NaN")
    assert not (tmp_path / "d").exists()


def test_infinities_of_masks_are_kept(tmp_path):
    mask = torch.tensor([0, -torch.inf]).bfloat16()
    save(tmp_path / "m", weights() | {"mask": mask})
    assert torch.equal(made(tmp_path / "m", tmp_path / "q")["mask"], mask)


@pytest.mark.parametrize("fallback", ["bf16", "fp16"])
def test_masks_of_the_lowest_number_stay_in_fp32(tmp_path, fallback):
    """BF16 rounds FP32's lowest number to an infinity."""
    mask = torch.full((130, 130), torch.finfo(torch.float32).min).triu(1)
    save(tmp_path / "m", weights() | {"mask": mask})
    assert run("analyze", tmp_path / "m", "-o", tmp_path / "analysis.json").exit_code == 0
    assert torch.equal(made(tmp_path / "m", tmp_path / "q", "--fallback-dtype", fallback)["mask"], mask)
    for name, options in (("d", ()), ("e", ("--dtype", "bf16"))):
        assert run("dequantize", tmp_path / "q", "-o", tmp_path / name, *options).exit_code == 0
        assert torch.equal(load_file(tmp_path / name / MODEL)["mask"], mask)


@pytest.mark.soak
def test_memory_is_that_of_the_largest_tensor(tmp_path):
    """Twice the largest tensor and 300 MB beyond the memory for a small model, measured in a process of its own."""
    save(tmp_path / "small", weights())
    save(tmp_path / "m", {f"l{i}.weight": torch.randn(2048, 2048).bfloat16() for i in range(32)})

    def peak(model, out):
        code = (
            "import sys\nfrom trtconvert.cli import main\n"
            "main(sys.argv[1:], standalone_mode=False)\n"
            "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        command = [sys.executable, "-c", code, "quantize", str(tmp_path / model), "-o", str(tmp_path / out)]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        return int(ended.stdout.splitlines()[-1]) * 1024

    assert peak("m", "a") - peak("small", "b") < 2 * 2048 * 2048 * 2 + 100e6  # the model has 268 MB
