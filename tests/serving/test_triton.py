"""Model repositories for Triton Inference Server, checked by its configuration schema and a stand-in for its Python backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import shutil
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import contents, refusal, run

from trtconvert.bundle import EngineRecord, file_record, read_manifest, write_manifest
from trtconvert.serving.drawing import Drawer
from trtconvert.serving.jobs import Batch, Drawn, Order, Shape
from trtconvert.serving.triton import Name, text_format


@pytest.fixture(scope="module")
def repository(digits, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "repository"
    outcome = run(
        "export-triton", digits, "-o", folder, "--name", "digits", "--steps", 4, "--max-steps", 20, "--max-batch", 3
    )
    assert outcome.exit_code == 0, outcome.output
    assert f"tritonserver --model-repository={folder}" in outcome.output and "trtconvert compile" in outcome.output
    return folder


def config_of(model: Path) -> Any:
    """Parse a model's configuration by Triton's schema, which refuses unknown fields and wrong types."""
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs tritonclient")
    from google.protobuf import text_format as protobuf

    config = protobuf.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), schema.ModelConfig())
    assert config.name == model.name
    for tensor in (*config.input, *config.output):
        assert len(tensor.dims) >= 1 and all(dim >= -1 for dim in tensor.dims)
        assert schema.DataType.Name(tensor.data_type) != "TYPE_INVALID"
    return config


def test_the_whole_and_each_component_are_models_of_the_repository(repository, digits):
    assert sorted(path.name for path in repository.iterdir()) == ["digits", "digits-denoiser"]
    whole, denoiser = config_of(repository / "digits"), config_of(repository / "digits-denoiser")
    assert (whole.backend, whole.max_batch_size, denoiser.backend, denoiser.max_batch_size) == (
        "python",
        3,
        "onnxruntime",
        0,
    )
    assert all(tensor.optional for tensor in whole.input) and [tensor.name for tensor in whole.output] == [
        "IMAGE",
        "SEED",
    ]
    assert whole.dynamic_batching.max_queue_delay_microseconds == 10_000
    assert whole.dynamic_batching.default_queue_policy.max_queue_size == 64
    assert {key: value.string_value for key, value in whole.parameters.items()} == {"steps": "4", "max_steps": "20"}
    assert [tuple(tensor.dims) for tensor in denoiser.input] == [(-1, 1, -1, -1), (-1,), (-1,)]
    assert denoiser.instance_group[0].Kind.Name(denoiser.instance_group[0].kind) == "KIND_CPU"
    assert contents(repository / "digits" / "1" / "bundle") == contents(digits)
    assert contents(repository / "digits-denoiser" / "1") == {"denoiser.onnx": (digits / "denoiser.onnx").read_bytes()}


def test_plans_are_served_by_the_gpu_that_they_are_for(digits, tmp_path, monkeypatch):
    """With the plugin library beside the plans, and the first of two plans for one architecture."""
    bundle = shutil.copytree(digits, tmp_path / "bundle")
    manifest = read_manifest(bundle)
    (bundle / "engines").mkdir()
    records, files = [], dict(manifest.files)
    for target, gpu in (("sm90", "H100"), ("sm90", "H200"), ("sm120", "RTX PRO 6000")):
        record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", target, gpu)
        record = record.model_copy(update={"plugin": "0.1.0", "profiles": [{"batch": (1, 1, 2)}, {"batch": (2, 4, 8)}]})
        (bundle / record.file).write_bytes(f"{target} {gpu}".encode())
        files[record.file] = file_record(bundle / record.file)
        records.append(record)
    components = {"denoiser": manifest.components["denoiser"].model_copy(update={"engines": records})}
    write_manifest(bundle, manifest.model_copy(update={"components": components, "files": files, "digest": ""}))
    library = tmp_path / "libtrtconvert.so"
    library.write_bytes(b"library")
    monkeypatch.setattr("trtconvert.serving.triton.library_path", lambda: library)
    outcome = run("export-triton", bundle, "-o", tmp_path / "repository", "--name", "plans")
    assert outcome.exit_code == 0 and "--backend-config=tensorrt,version-compatible=true" in outcome.output
    assert "sm120 with TensorRT 10.6.0, sm90 with TensorRT 10.6.0" in outcome.output
    whole, denoiser = (config_of(tmp_path / "repository" / name) for name in ("plans", "plans-denoiser"))
    assert whole.instance_group[0].Kind.Name(whole.instance_group[0].kind) == "KIND_GPU"
    assert (denoiser.platform, denoiser.backend) == ("tensorrt_plan", "tensorrt")
    found = contents(tmp_path / "repository" / "plans-denoiser" / "1")
    assert found == {
        "denoiser-tensorrt-sm90-h100.plan": b"sm90 H100",
        "denoiser-tensorrt-sm120-rtx-pro-6000.plan": b"sm120 RTX PRO 6000",
        "libtrtconvert.so": b"library",
    }
    by_capability = {key: found[name] for key, name in denoiser.cc_model_filenames.items()}
    assert by_capability == {"9.0": b"sm90 H100", "12.0": b"sm120 RTX PRO 6000"}
    assert denoiser.default_model_filename in found and list(denoiser.instance_group[0].profile) == ["0", "1"]


def test_text_of_any_kind_is_read_back(tmp_path):
    config = {
        "name": tmp_path.name,
        "backend": 'q"\\\n\u00e9',
        "input": [],
        "model_warmup": [{"name": "x", "batch_size": 2}],
    }
    config["output"] = [{"name": "y", "data_type": Name("TYPE_FP32"), "dims": [1], "reshape": {"shape": []}}]
    config["response_cache"] = {"enable": True}
    (tmp_path / "config.pbtxt").write_text(text_format(config), encoding="utf-8")
    read = config_of(tmp_path)
    assert read.backend == 'q"\\\n\u00e9' and read.response_cache.enable and read.output[0].HasField("reshape")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--name", "../x"), "letters, digits"),
        (("--name", "x" * 101), "letters, digits"),
        (("--steps", 300), "raise --max-steps"),
        (("--batch-wait-ms", "nan"), "got: nan"),
    ],
)
def test_odd_options_are_refused(digits, tmp_path, options, words):
    refusal(run("export-triton", digits, "-o", tmp_path / "repository", *options), words)
    assert not (tmp_path / "repository").exists()


def test_existing_output_stays_without_force(repository, digits, tmp_path):
    before = contents(repository)
    refusal(
        run("export-triton", digits, "-o", repository, "--name", "digits"), "has a model 'digits' already", "--force"
    )
    assert contents(repository) == before
    copied = shutil.copytree(repository, tmp_path / "repository")
    (copied / "other").mkdir()
    assert run("export-triton", digits, "-o", copied, "--name", "digits", "--force").exit_code == 0
    assert (copied / "other").is_dir() and "50" in (copied / "digits" / "config.pbtxt").read_text()
    refusal(run("export-triton", digits, "-o", digits / "repository"), "lies in the bundle")
    (tmp_path / "file").write_bytes(b"")
    refusal(run("export-triton", digits, "-o", tmp_path / "file"), "-o")
    refusal(run("export-triton", tmp_path / "none", "-o", tmp_path / "new"))


# The Python backend -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tensor:
    """Stands in for `pb_utils.Tensor`."""

    name: str
    values: np.ndarray

    def as_numpy(self) -> np.ndarray:
        return self.values


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, INTERNAL = "invalid", "unavailable", "internal"


@dataclasses.dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = dataclasses.field(default_factory=list)
    error: TritonError | None = None


def inputs(**named: Any) -> Mapping[str, Tensor]:
    """Make a request, with texts as bytes in object arrays and a row for each image."""

    def array(values: list[Any]) -> np.ndarray:
        kind = np.object_ if isinstance(values[0], (str, bytes)) else np.int64
        return np.array([[x.encode() if isinstance(x, str) else x] for x in values], dtype=kind)

    return {name: Tensor(name, array(values)) for name, values in named.items()}


@pytest.fixture(scope="module")
def model(repository) -> Iterator[Any]:
    """Start the repository's model.py like Triton."""
    backend = types.ModuleType("triton_python_backend_utils")
    for name, value in {
        "Tensor": Tensor,
        "TritonError": TritonError,
        "InferenceResponse": InferenceResponse,
        "get_input_tensor_by_name": lambda request, name: request.get(name),
    }.items():
        setattr(backend, name, value)
    sys.modules[backend.__name__] = backend
    try:
        spec = importlib.util.spec_from_file_location("model", repository / "digits" / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = module.TritonPythonModel()
        config = {
            "max_batch_size": 3,
            "parameters": {"steps": {"string_value": "4"}, "max_steps": {"string_value": "20"}},
        }
        made.initialize(
            {
                "model_config": json.dumps(config),
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
                "model_repository": str(repository / "digits"),
                "model_version": "1",
                "model_name": "digits",
            }
        )
        yield made
        made.finalize()
    finally:
        del sys.modules[backend.__name__]


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)), dtype=np.int16)


def test_requests_of_one_execution_are_drawn_as_they_were_alone(model, digits):
    """Requests of several shapes and sizes; each answer has its own images and seeds."""
    requests = [
        inputs(PROMPT=["3", "4", "5", "6"], SEED=[1, 2, 3, 4]),
        inputs(SEED=[5], STEPS=[2]),
        inputs(PROMPT=["7"], SEED=[6], FORMAT=["webp"]),
        inputs(PROMPT=["8"]),
    ]
    responses = model.execute(requests)
    assert [response.error for response in responses] == [None] * 4
    images, seeds = ([tensor.values for tensor in (r.output_tensors[i] for r in responses)] for i in (0, 1))
    assert [x.shape for x in images] == [(4, 1), (1, 1), (1, 1), (1, 1)] and [x.shape for x in seeds] == [
        x.shape for x in images
    ]
    assert seeds[0].ravel().tolist() == [1, 2, 3, 4] and images[2][0, 0][8:12] == b"WEBP" and seeds[3][0, 0] >= 0
    drawer = Drawer(digits, "cpu")
    orders = tuple(Order(seed, digit, "png") for seed, digit in ((1, "3"), (4, "6")))
    expected = drawer(Batch(Shape(None, None, 4, True), orders)) + drawer(
        Batch(Shape(None, None, 2, False), (Order(5, None, "png"),))
    )
    for answer, image in zip(expected, (images[0][0, 0], images[0][3, 0], images[1][0, 0]), strict=True):
        assert isinstance(answer, Drawn) and np.abs(pixels(answer.image) - pixels(image)).max() <= 1
    drawer.close()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (inputs(PROMPT=["a cat"]), "one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, or nothing"),
        (inputs(PROMPT=[b"\xff"]), "UTF-8"),
        (inputs(SEED=[-1]), "from 0"),
        (inputs(SEED=[1], STEPS=[21]), "at most 20"),
        (inputs(SEED=[1], SIZE=["16x16"]), "8x8 or auto"),
        (inputs(SEED=[1], FORMAT=["bmp"]), "png, jpeg, webp"),
        ({}, "no inputs"),
    ],
)
def test_a_request_that_cannot_be_drawn_is_an_error_and_the_others_are_drawn(model, request_, words):
    failed, drawn = model.execute([request_, inputs(SEED=[1])])
    message, code = failed.error.args
    assert words in message and "remedy: " in message and code == TritonError.INVALID_ARG
    assert drawn.error is None and len(drawn.output_tensors) == 2
