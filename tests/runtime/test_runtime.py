"""Loaded bundles: accepted and refused inputs of a denoiser."""

import errno
import functools
import os
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from tolerances import SAME_ARITHMETIC

from trtconvert import models, runtime
from trtconvert.bundle import (
    MANIFEST,
    TRANSPOSED,
    ComponentRecord,
    EngineRecord,
    TensorRecord,
    read_manifest,
    write_manifest,
)
from trtconvert.engine import BackendStatus
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.recorded_calls import relative_error
from trtconvert.runtime import bundles
from trtconvert.runtime.compatibility import Machine, fitting_engine
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.runtime.signature import Signature


@pytest.fixture(scope="module")
def loaded(digits_build):
    return runtime.load(digits_build.bundle)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(2, 1, 8, 8, generator=generator),
        "timestep": torch.tensor([10.0, 900.0]),
        "label": torch.tensor([3, 4]),
    }


def refused(denoiser, *positional, parts, **named):
    with pytest.raises(UserError) as error:
        denoiser(*positional, **named)
    for part in ("expected: ", "got: ", "remedy: ", *parts):
        assert part in str(error.value), str(error.value)


def test_inputs_go_by_position_or_by_name(loaded, inputs):
    by_name = loaded["denoiser"](**inputs)
    assert by_name.shape == (2, 1, 8, 8) and by_name.dtype == torch.float32
    assert torch.equal(by_name, loaded["denoiser"](*inputs.values()))
    assert torch.equal(by_name, loaded["denoiser"](inputs["x"], label=inputs["label"], timestep=inputs["timestep"]))


def test_floating_point_inputs_are_converted(loaded, inputs):
    exact = inputs["x"].half().float()  # the values that both types have
    assert torch.equal(
        loaded["denoiser"](**inputs | {"x": exact.half()}), loaded["denoiser"](**inputs | {"x": exact.double()})
    )


def test_inputs_may_be_views_and_need_gradients(loaded, inputs):
    view = inputs["x"].transpose(2, 3).requires_grad_()
    assert torch.equal(
        loaded["denoiser"](**inputs | {"x": view}),
        loaded["denoiser"](**inputs | {"x": view.detach().contiguous()}),
    )


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_sample_does_not_depend_on_its_batch(loaded, digits_build, batch):
    """8 is the profile's largest batch. The dot products of INT8 are exact; FP32 rounds differently per batch size."""
    sampler = models.load_sampler(loaded)
    (alone,) = sampler(loaded["denoiser"], [7], steps=4, solver="ddim")
    together = sampler(loaded["denoiser"], range(8 - batch, 8), steps=4, solver="ddim")
    assert relative_error(together[-1], alone) <= SAME_ARITHMETIC


WIDER, OF_THE_MODEL = "widen engine.shapes in the recipe", "pass a tensor of that shape"


@pytest.mark.parametrize(
    ("name", "value", "got", "remedy"),
    [
        ("x", torch.zeros(9, 1, 8, 8), "[9, 1, 8, 8]", WIDER),
        ("x", torch.zeros(2, 3, 8, 8), "[2, 3, 8, 8]", OF_THE_MODEL),
        ("x", torch.zeros(2, 1, 8, 9), "[2, 1, 8, 9]", WIDER),
        ("x", torch.zeros(2, 1, 64), "[2, 1, 64]", OF_THE_MODEL),
        ("x", torch.zeros(0, 1, 8, 8), "[0, 1, 8, 8]", WIDER),
        ("timestep", torch.tensor(5.0), "[]", OF_THE_MODEL),
        ("timestep", torch.zeros(9), "[9]", WIDER),
    ],
)
def test_a_shape_outside_the_profile_is_refused(loaded, inputs, name, value, got, remedy):
    parts = (f"the shape of '{name}'", "batch 1..8", f"got: {got}", f"remedy: {remedy}")
    refused(loaded["denoiser"], parts=parts, **inputs | {name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("timestep", torch.zeros(3)), ("label", torch.zeros(1, dtype=torch.int64))]
)
def test_sizes_that_differ_between_inputs_are_refused_as_such(loaded, inputs, name, value):
    """Each size is in range, so that the remedy needs no new build."""
    parts = (f"the shape of '{name}'", "expected: batch 2", f"got: {list(value.shape)} for [batch]", ".expand()")
    refused(loaded["denoiser"], parts=parts, **inputs | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("x", torch.zeros(2, 1, 8, 8, dtype=torch.int64), ("wrong type", "expected: float32", "got: int64")),
        ("label", torch.zeros(2, dtype=torch.int32), ("wrong type", "expected: int64", "got: int32")),
        ("label", torch.zeros(2), ("wrong type", "expected: int64", "got: float32")),
        ("x", torch.zeros(2, 1, 8, 8).numpy(), ("not a tensor", "got: ndarray")),
        ("timestep", 5.0, ("not a tensor", "got: float")),
    ],
)
def test_another_type_is_refused(loaded, inputs, name, value, parts):
    refused(loaded["denoiser"], parts=(f"'{name}'", *parts), **inputs | {name: value})


def test_inputs_that_are_missing_unknown_or_given_twice_are_refused(loaded, inputs):
    denoiser, (x, timestep, label) = loaded["denoiser"], inputs.values()
    refused(denoiser, x, timestep, parts=("expected: x, timestep, label", "got: x, timestep\n"))
    refused(denoiser, parts=("got: none",))
    refused(denoiser, x, timestep, labels=label, parts=("got: x, timestep, labels",))
    refused(denoiser, x, timestep, label, x=x, parts=("got: x, timestep, label, x",))
    refused(denoiser, x, timestep, label, label, parts=("got: x, timestep, label, …",))


def test_a_bundle_has_its_components_names(loaded):
    assert "denoiser" in loaded and "vae" not in loaded and list(loaded) == ["denoiser"]


def test_a_component_that_the_bundle_does_not_have_is_refused(loaded):
    with pytest.raises(UserError, match=r"(?s)no component 'vae'.*expected: denoiser.*got: vae.*remedy: "):
        loaded["vae"]


def test_a_damaged_bundle_is_not_run(tiny_build, tmp_path):
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    with (bundle / "denoiser.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"denoiser\.onnx in the bundle .* is damaged"):
        runtime.load(bundle)


def test_loading_needs_no_weights_and_not_the_place_where_it_was_built(tiny_build, tmp_path, monkeypatch):
    moved = shutil.copytree(tiny_build.bundle, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    output = runtime.load("moved")["denoiser"](torch.zeros(1, 1, 4, 4), torch.zeros(1))
    assert output.isfinite().all()
    assert moved.is_dir()


def test_a_model_that_onnx_runtime_cannot_run_is_refused(loaded, tmp_path):
    """A matrix product in FP8, which ONNX Runtime lacks on the CPU."""
    types = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT8E4M3FN, [2, 2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "x"], ["y"])], "", types[:1], types[1:])
    path = tmp_path / "fp8.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9), path)
    with pytest.raises(BackendUnavailable, match=r"(?s)cannot run fp8\.onnx.*got: .*MatMul.*remedy: "):
        OnnxRuntimeComponent(path, loaded.manifest.components["denoiser"])


def test_a_lack_of_memory_is_no_fault_of_the_inputs(tmp_path):
    """A server would blame the client's request for it."""
    model = """<ir_version: 9, opset_import: ["": 18]> of_length (float[length] t) => (float[length] y)
    <int64[3] sizes = {4194304, 8388608, 1}> { wide = Expand(t, sizes) y = ReduceSum(wide) }"""
    onnx.save(onnx.parser.parse_model(model), tmp_path / "large.onnx")
    vector = {"dtype": "float32", "shape": ["length"]}
    record = ComponentRecord(
        onnx="large.onnx", inputs=[TensorRecord(name="t", **vector)], outputs=[TensorRecord(name="y", **vector)],
        timestep_input="t", timestep_max=1.0, dims={"length": (1, 1, 4)}, engines=[],
    )  # fmt: skip
    with pytest.raises(
        BackendUnavailable, match=r"(?s)no memory left.*got: .*allocate memory.*remedy: free host memory"
    ):
        OnnxRuntimeComponent(tmp_path / "large.onnx", record)(torch.ones(1))


def test_a_closed_bundle_is_not_called(tiny_build):
    with runtime.load(tiny_build.bundle) as bundle:
        denoiser = bundle["denoiser"]
        assert denoiser(torch.zeros(1, 1, 4, 4), torch.zeros(1)).isfinite().all()
        assert bundle.device_memory.weights == bundle.device_memory.per_stream == 0
    refused(denoiser, torch.zeros(1, 1, 4, 4), torch.zeros(1), parts=("was closed", "load the bundle again"))


def test_tensorrt_is_refused_where_there_is_no_gpu(tiny_build):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match=r"(?s)needs an NVIDIA GPU.*backend='onnxruntime'"):
        runtime.load(tiny_build.bundle, backend="tensorrt")


@pytest.mark.parametrize(
    ("argument", "value"), [("graphs", -1), ("streams", 0), ("weight_budget", -1), ("graphs", "4"), ("streams", 1.5)]
)
def test_arguments_out_of_range_are_refused(tiny_build, argument, value):
    with pytest.raises(UserError, match=rf"(?s){argument}={value!r}.*expected: \d or more.*remedy: "):
        runtime.load(tiny_build.bundle, **{argument: value})


def test_a_bundle_that_is_compiled_while_it_is_read_is_read_again(tiny_build, tmp_path):
    """The old engine is removed when the new manifest is there."""
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    (old := bundle / "engines" / "old.plan").parent.mkdir(exist_ok=True)
    old.write_bytes(b"of before")
    manifest = read_manifest(bundle)
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest)
    check = bundles.check_files

    def compiled_meanwhile(folder, found):
        if old.exists():
            old.unlink()
            (bundle / MANIFEST).unlink()
            write_manifest(bundle, manifest)
        check(folder, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "check_files", compiled_meanwhile)
        with runtime.load(bundle) as loaded:
            assert "engines/old.plan" not in loaded.manifest.files


@pytest.mark.parametrize("goes", [True, False])
def test_a_bundle_that_is_built_again_while_its_files_are_read_is_read_again(tiny_build, tmp_path, monkeypatch, goes):
    """After the check: the opened files may be old, new or missing."""
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    made = []

    class Component(OnnxRuntimeComponent):
        def __init__(self, path, component):
            made.append(self)
            super().__init__(path, component)
            if len(made) == 1:
                manifest = read_manifest(bundle).model_copy(update={"backend_reason": "later"})
                (bundle / MANIFEST).unlink()
                write_manifest(bundle, manifest)
                if goes:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(bundles, "OnnxRuntimeComponent", Component)
    with runtime.load(bundle) as loaded:
        assert (
            loaded.manifest.backend_reason == "later"
            and list(loaded.components.values()) == made[1:]
            and len(made) == 2
        )
        if not goes:
            with pytest.raises(UserError, match="was closed"):
                made[0](torch.zeros(1, 1, 4, 4), torch.zeros(1))


def test_a_file_that_is_not_there_and_no_new_bundle_either_ends_the_loading(tiny_build, monkeypatch):
    def gone(path, component):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(bundles, "OnnxRuntimeComponent", gone)
    with pytest.raises(FileNotFoundError):
        runtime.load(tiny_build.bundle)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(1, 1, 4, 4, device="meta"), "meta device"),
        (torch.zeros(1, 1, 4, 4).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_tensors_without_numbers_in_memory_are_refused(tiny_build, x, said):
    with runtime.load(tiny_build.bundle) as bundle:
        refused(bundle["denoiser"], x, torch.zeros(1), parts=("not a dense tensor", said))


@pytest.mark.parametrize("backend", ["TensorRT", "cuda", "", None])
def test_a_backend_that_does_not_exist_is_refused(tiny_build, backend):
    with pytest.raises(UserError, match=rf"(?s)no backend '{backend}'.*expected: auto, tensorrt, onnxruntime"):
        runtime.load(tiny_build.bundle, backend=backend)


@pytest.mark.parametrize("asked", [{"backend": "onnxruntime"}, {"device": "cpu"}, {"device": torch.device("cpu")}])
def test_a_bundle_for_the_cpu_asks_nothing_of_a_gpu(tiny_build, monkeypatch, asked):
    def status():
        raise AssertionError("a process that only checks a bundle takes no memory on GPUs")

    monkeypatch.setattr(bundles.builder, "status", status)
    with runtime.load(tiny_build.bundle, **asked) as bundle:
        assert bundle.backend.startswith("ONNX Runtime")


NO_GPU = BackendStatus("tensorrt", "", False, "no NVIDIA GPU", "build on the machine that the engine is for")
WITH_GPU = BackendStatus("tensorrt", "", True, "10.6", "")


def test_on_the_cpu_there_are_no_graphs_and_no_new_weights(tiny_build):
    with runtime.load(tiny_build.bundle, device="cpu") as bundle:
        denoiser = bundle["denoiser"]
        assert denoiser.graphs_recorded == denoiser.graphs_memory == 0
        with pytest.raises(BackendUnavailable, match=r"(?s)cannot be replaced.*refittable.*remedy: "):
            denoiser.refit("new.safetensors")


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
@pytest.mark.parametrize(
    ("state", "backend", "said"),
    [
        (NO_GPU, "auto", r"got: no NVIDIA GPU\n.*remedy: build on the machine"),
        (WITH_GPU, "auto", r"got: no engine of denoiser\n.*remedy: run `trtconvert compile`"),
        (WITH_GPU, "onnxruntime", r"got: ONNX Runtime, which runs on the CPU.*remedy: leave out"),
    ],
)
def test_a_gpu_that_is_named_is_not_replaced_by_the_cpu(tiny_build, monkeypatch, device, state, backend, said):
    monkeypatch.setattr(bundles.builder, "status", lambda: state)
    with pytest.raises(BackendUnavailable, match=rf"(?s)cannot run on '{device}'.*{said}"):
        runtime.load(tiny_build.bundle, backend=backend, device=device)


@pytest.mark.parametrize("device", ["gpu:0", -1, "cuda:-1", "cuda:1", 1, "cpu", torch.device("cpu")])
def test_a_gpu_that_does_not_exist_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendUnavailable, match=rf"(?s)no GPU '{device}'.*expected: cuda:0 to cuda:0.*got: {device}"):
        bundles.gpu_of(device)
    for given in (None, 0, "cuda", "cuda:0", torch.device("cuda")):
        assert bundles.gpu_of(given) == torch.device("cuda", 0)


def test_a_process_that_was_forked_with_cuda_is_told(tiny_build, monkeypatch):
    """Torch says to use spawn, and the driver that it fails; and a bundle with engines ran on the CPU without a word."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for given in ({"backend": "tensorrt"}, {"backend": "tensorrt", "device": "cuda:0"}):
        with pytest.raises(BackendUnavailable, match=r"(?s)in this process.*got: .*forked.*remedy: .*spawn"):
            runtime.load(tiny_build.bundle, **given)
    state = bundles.builder.status()
    assert "forked" in state.detail and "spawn" in state.remedy
    with pytest.raises(BackendUnavailable, match=r"(?s)cannot run on 'cuda'.*forked.*spawn"):
        runtime.load(tiny_build.bundle, device="cuda")


def test_closing_a_bundle_closes_every_component(tiny_build):
    """Even if one of them raises."""
    closed = []

    def close(name):
        closed.append(name)
        raise RuntimeError(f"{name} is gone")

    components = {name: SimpleNamespace(close=functools.partial(close, name)) for name in ("unet", "vae")}
    with pytest.raises(RuntimeError, match="is gone"):
        runtime.LoadedBundle(tiny_build.bundle, None, components, "").close()
    assert sorted(closed) == ["unet", "vae"]


def test_values_that_the_model_does_not_take_are_refused(loaded, inputs):
    """A label outside the table of embeddings."""
    refused(loaded["denoiser"], parts=("on these inputs", "Gather"), **inputs | {"label": torch.tensor([3, 4000])})


def test_a_component_that_is_closed_during_a_call_finishes_it(tiny_build, monkeypatch):
    with runtime.load(tiny_build.bundle) as bundle:
        denoiser = bundle["denoiser"]
        check = denoiser.signature.check
        monkeypatch.setattr(denoiser.signature, "check", lambda tensors: (bundle.close(), check(tensors))[1])
        assert denoiser(torch.zeros(1, 1, 4, 4), torch.zeros(1)).isfinite().all()
        with pytest.raises(UserError, match="was closed"):
            denoiser(torch.zeros(1, 1, 4, 4), torch.zeros(1))


def test_a_bundle_says_why_its_engines_do_not_run_here(tiny_build, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    manifest = read_manifest(bundle)
    with_engine = manifest.components["denoiser"].model_copy(update={"engines": [engine()]})
    (bundle / engine().file).parent.mkdir()
    (bundle / engine().file).write_bytes(b"plan")
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest.model_copy(update={"components": {"denoiser": with_engine}}))
    with runtime.load(bundle) as loaded:
        assert loaded.backend.startswith("ONNX Runtime on the CPU") and loaded.backend.endswith(
            "cannot run here: no NVIDIA GPU"
        )
    with monkeypatch.context() as forked:
        forked.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        with pytest.warns(RuntimeWarning, match=r"on the CPU.*forked.*remedy: .*spawn"):
            runtime.load(bundle).close()
    # Where there is one, nobody wants the CPU.
    monkeypatch.setattr(bundles.builder, "device_architecture", lambda: "sm90")
    state = BackendStatus("tensorrt", "", False, "TensorRT's Python package is not installed", "install it")
    monkeypatch.setattr(bundles.builder, "status", lambda: state)
    with pytest.warns(RuntimeWarning, match="on the CPU.*package is not installed; remedy: install it") as told:
        runtime.load(bundle).close()
    assert told[0].filename == __file__


def test_weights_of_the_onnx_model_have_the_names_of_the_state_dict(digits_build, digits):
    """Refits use these names, with a suffix for transposed weights."""
    model = onnx.load(digits_build.bundle / "denoiser.onnx")
    found = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    for name, weight in digits.denoiser.state_dict().items():
        as_is = name in found
        array = found[name] if as_is else found[name + TRANSPOSED].T
        assert np.array_equal(array, weight.numpy()), name


# Profiles and machines: TensorRT is not needed to know what it would take ----------------------------------------------

IMAGE = TensorRecord(name="x", dtype="float16", shape=["batch", 4, "height", "width"])
PROFILES = (
    {"batch": (1, 2, 8), "height": (32, 64, 64), "width": (32, 64, 64)},
    {"batch": (1, 1, 2), "height": (32, 128, 128), "width": (32, 128, 128)},
)


def component(*engines: EngineRecord) -> ComponentRecord:
    hull = {"batch": (1, 2, 8), "height": (32, 64, 128), "width": (32, 64, 128)}
    return ComponentRecord(
        onnx="x.onnx",
        inputs=[IMAGE],
        outputs=[IMAGE],
        timestep_input="x",
        timestep_max=1,
        dims=hull,
        sites=[],
        engines=list(engines),
    )


@pytest.mark.parametrize(
    ("shape", "profile"), [((8, 64, 64), 0), ((2, 128, 64), 1), ((2, 64, 64), 0), ((1, 64, 64), 0), ((1, 64, 48), 0)]
)
def test_the_profile_with_the_nearest_opt_shape_is_taken(shape, profile):
    x = torch.zeros(shape[0], 4, *shape[1:], dtype=torch.float16)
    assert Signature(component(), PROFILES).check([x])[0] == profile


def test_sizes_that_no_profile_holds_together_are_refused_with_the_profiles():
    with pytest.raises(UserError) as error:
        Signature(component(), PROFILES).check([torch.zeros(8, 4, 128, 128, dtype=torch.float16)])
    message = str(error.value)
    assert "batch 1..8 × height 32..64 × width 32..64; or batch 1..2 × height 32..128 × width 32..128" in message
    assert "got: batch 8, height 128, width 128" in message and "engine.profiles" in message


def engine(**fields) -> EngineRecord:
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0.post2", "sm90")
    return record.model_copy(update={"plugin": "0.1.0"} | fields)


HERE = Machine("sm90", "10.6.0.post2", "0.1.0")


@pytest.mark.parametrize(
    ("machine", "fields"),
    [
        (HERE, {}),
        (Machine("sm90", "10.6.0", "0.2.0"), {}),
        (Machine("sm120", "10.6.0", "0.1.0"), {"hardware_compatible": True}),
        (Machine("sm90", "10.15.1", "0.1.0"), {"version_compatible": True}),
    ],
)
def test_an_engine_that_runs_here_is_taken(machine, fields):
    others = [engine(target="sm75"), engine(**fields), engine(library="10.6.0", file="later")]
    assert fitting_engine("denoiser", others, machine) is others[1]


def test_an_engine_of_the_same_gpu_goes_before_others_of_its_architecture():
    here = Machine("sm90", "10.6.0", "0.1.0", "NVIDIA H200")
    others = [engine(gpu="NVIDIA H100"), engine(gpu="NVIDIA H200"), engine(gpu="NVIDIA H200")]
    with warnings.catch_warnings(action="error"):
        assert fitting_engine("denoiser", others, here) is others[1]
        for anywhere in ({"hardware_compatible": True}, {"gpu": ""}):
            fitting_engine("denoiser", [engine(**{"gpu": "NVIDIA H100"} | anywhere)], here)
    match = r"timed on NVIDIA H100, but this is NVIDIA H200.*`trtconvert compile`"
    with pytest.warns(RuntimeWarning, match=match) as told:
        assert fitting_engine("denoiser", others[:1], here) is others[0]
    assert told[0].filename == __file__


@pytest.mark.parametrize(("visible", "named"), [(None, "1"), ("4, 6", "6"), ("0,GPU-8f1c", "GPU-8f1c")])
def test_a_second_gpu_is_compiled_for_by_its_index(monkeypatch, visible, named):
    """The index counts the GPUs that the process sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    second = Machine("sm89", "10.6.0", "0.1.0", "NVIDIA L40S", 1)
    with pytest.raises(BackendUnavailable, match=f"remedy: run `CUDA_VISIBLE_DEVICES={named} trtconvert compile`"):
        fitting_engine("denoiser", [engine()], second)


@pytest.mark.parametrize(
    ("machine", "fields", "expected"),
    [
        (Machine("sm89", "10.6.0", "0.1.0"), {}, "a GPU of sm90"),
        (Machine("sm75", "10.6.0", "0.1.0"), {"hardware_compatible": True}, "a GPU of sm80 or newer"),
        (Machine("sm90", "10.6.1", "0.1.0"), {}, "TensorRT 10.6.0.post2"),
        (Machine("sm90", "10.5.9", "0.1.0"), {"version_compatible": True}, "TensorRT 10.6.0.post2 or newer, 10.x"),
        (Machine("sm90", "11.2.1", "0.1.0"), {"version_compatible": True}, "TensorRT 10.6.0.post2 or newer, 10.x"),
        (Machine("sm90", "10.6.0", "0.0.9"), {}, "the plugin library 0.1.0 or newer"),
    ],
)
def test_an_engine_for_another_machine_is_refused(machine, fields, expected):
    with pytest.raises(BackendUnavailable) as error:
        fitting_engine("denoiser", [engine(**fields)], machine)
    message = str(error.value)
    got = f"got: {machine.architecture}, TensorRT {machine.tensorrt}, plugin library {machine.plugin}"
    for part in (
        f"expected: {expected} (engines/denoiser-tensorrt-sm90.plan)",
        got,
        "remedy: run `trtconvert compile`",
    ):
        assert part in message
