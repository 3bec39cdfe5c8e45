"""Loaded TensorRT engines: what they compute, whom they serve at once, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from cuda.bindings import runtime as cudart
from rich.console import Console
from safetensors.torch import save_file
from support import WEIGHTS, at_once, tiny_recipe
from tolerances import HALF_DENOISER

from trtconvert import runtime
from trtconvert.bundle import read_manifest, write_manifest
from trtconvert.cache import Cache
from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.evaluate.verify import relative_error
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime import lane
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]

LOADS_GROWTH = 32 * 2**20
"""Bytes over a hundred loads. What allocators and the driver round up to; an engine that stays is 3 MiB or more each time."""

CALLS_GROWTH = 4 * 2**20
"""Bytes of host memory over ten thousand calls: 400 each. A tensor that is kept takes twice as many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The shipped model in FP16 as a refittable engine with two profiles."""
    folder = tmp_path_factory.mktemp("engine")
    recipe = folder / "recipe.yaml"
    sides = {"height": 8, "width": 8}
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS), "dtype": "float16"},
        "attention": {"modes": ["precision", "balanced"]},
        "calibration": {"samples": 4, "batch": 2, "steps": 4, "bins": 2},
        "engine": {
            "backend": "tensorrt",
            "attention": "plugin",
            "refittable": True,
            "profiles": [{"batch": [1, 1, 2], **sides}, {"batch": [3, 8, 16], **sides}],
        },
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    recipe.write_text(json.dumps(sections))
    build(load_recipe(recipe), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


@pytest.fixture
def loaded(folder):
    with runtime.load(folder, backend="tensorrt") as bundle:
        yield bundle


@pytest.fixture
def denoiser(loaded) -> TensorRTComponent:
    return loaded["denoiser"]


def make_inputs(batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """In the signature's order, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 1, 8, 8, generator=generator).to("cuda", dtype)
    timestep = (torch.rand(batch, generator=generator) * 999).cuda()
    return [x, timestep, torch.randint(0, 10, (batch,), generator=generator).cuda()]


def resident() -> int:
    """Bytes of host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """Bytes of device memory in use, by torch and by others."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


# What is computed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_it_computes_what_onnx_runtime_does(denoiser, folder, batch):
    """In both profiles, at their limits."""
    inputs = make_inputs(batch)
    with runtime.load(folder, backend="onnxruntime") as reference:
        expected = reference["denoiser"](*inputs)
    assert relative_error(denoiser(*inputs).cpu(), expected) <= HALF_DENOISER


def test_a_graph_gives_the_bits_of_a_plain_call(folder, denoiser):
    with runtime.load(folder, backend="tensorrt", graphs=0) as plain:
        for batch in (2, 5, 2, 5, 2, 5):
            for seed in range(3):
                inputs = make_inputs(batch, seed)
                assert torch.equal(denoiser(*inputs), plain["denoiser"](*inputs))
        assert plain["denoiser"].graphs_recorded == 0
    assert denoiser.graphs_recorded == 2


def test_the_least_recently_used_graph_goes(folder):
    with runtime.load(folder, backend="tensorrt", graphs=1) as bundle:
        denoiser = bundle["denoiser"]
        expected = {batch: denoiser(*make_inputs(batch)) for batch in (1, 2)}
        for batch in (1, 1, 2, 2, 1, 1):
            assert torch.equal(denoiser(*make_inputs(batch)), expected[batch])
        assert denoiser.graphs_recorded == 3


def test_outputs_are_fresh(denoiser):
    """A later call, replayed from a graph, leaves earlier outputs as they are."""
    inputs = make_inputs()
    first = denoiser(*inputs)
    kept = first.clone()
    for seed in range(1, 5):
        denoiser(*make_inputs(seed=seed))
    assert torch.equal(first, kept)


def test_inputs_are_taken_from_where_and_how_they_lie(denoiser):
    x, timestep, label = make_inputs()
    expected = denoiser(x, timestep, label)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 256
    for given in (x.transpose(2, 3).contiguous().transpose(2, 3), shifted, x.float(), x.double().requires_grad_()):
        for _ in range(3):  # plainly, recorded, replayed
            assert torch.equal(denoiser(given, timestep, label), expected)
    for _ in range(3):
        on_cpu = denoiser(x.cpu(), timestep, label)
        assert on_cpu.device.type == "cpu" and torch.equal(on_cpu, expected.cpu())


def test_inputs_may_go_while_the_device_is_still_busy(denoiser):
    """The launch is far behind when the host lets go of inputs, and other tensors take their memory."""
    sets = [make_inputs(seed=seed) for seed in range(10)]
    expected = [denoiser(*inputs) for inputs in sets]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096
    given = []
    for x, timestep, label in sets:
        given.append(denoiser(x.clone(), timestep.clone(), label.clone()))
        for like in (x, timestep):
            torch.full_like(like, float("nan"))
    assert all(torch.equal(*pair) for pair in zip(given, expected, strict=True))


def test_memory_that_the_driver_had_back_meanwhile_is_read(denoiser):
    """A graph's copies keep addresses from launch to launch; what is behind an address may be mapped anew."""
    expected = [denoiser(*make_inputs(seed=seed)) for seed in range(4)]
    for _ in range(3):
        for seed in range(4):
            assert torch.equal(denoiser(*make_inputs(seed=seed)), expected[seed])
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Foreign:
    """Memory of the GPU that CUDA's own pool gave, as a tensor of some other library."""

    def __init__(self, x: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        status, self.address = cudart.cudaMallocAsync(x.nbytes, stream)
        assert status == cudart.cudaError_t.cudaSuccess
        self.__cuda_array_interface__ = x.__cuda_array_interface__ | {"data": (int(self.address), False)}
        weakref.finalize(self, cudart.cudaFreeAsync, self.address, stream)


def test_memory_that_torch_did_not_allocate_is_read(denoiser):
    x, timestep, label = make_inputs()
    expected = denoiser(x, timestep, label)
    foreign = torch.as_tensor(Foreign(x), device="cuda")
    foreign.copy_(x)
    for given in (x, foreign, x, foreign):
        assert torch.equal(denoiser(given, timestep, label), expected)


def test_a_call_that_cannot_be_recorded_runs_plainly(folder, monkeypatch):
    def refuse(*arguments):
        raise BackendUnavailable("the driver does not record")

    monkeypatch.setattr(lane, "CopyingGraph", refuse)
    with runtime.load(folder, backend="tensorrt") as bundle:
        denoiser, inputs = bundle["denoiser"], make_inputs()
        expected = denoiser(*inputs)
        with pytest.warns(RuntimeWarning, match="without CUDA graphs.*the driver does not record"):
            assert torch.equal(denoiser(*inputs), expected)
        assert torch.equal(denoiser(*inputs), expected) and denoiser.graphs_recorded == 0


def test_gradients_and_inference_mode_do_not_matter(denoiser):
    x, timestep, label = make_inputs()
    with torch.inference_mode():
        expected = [denoiser(x, timestep, label) for _ in range(3)][-1]
    output = denoiser(x.clone().requires_grad_(), timestep, label)  # from the graph that was recorded above
    assert not output.requires_grad and not output.is_inference() and torch.equal(output, expected)


def test_a_call_is_part_of_the_callers_own_graph(denoiser):
    inputs, stream = make_inputs(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            denoiser(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = denoiser(*inputs)
    for seed in (1, 2):
        other = make_inputs(seed=seed)
        for mine, new in zip(inputs, other, strict=True):
            mine.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, denoiser(*other))


@pytest.mark.parametrize("graphs", [0, 4])
def test_the_callers_own_graph_outlives_other_shapes_and_streams(folder, graphs):
    """What it refers to is neither told other shapes nor given to another stream."""
    with runtime.load(folder, backend="tensorrt", graphs=graphs, streams=1) as bundle:
        denoiser, inputs, stream = bundle["denoiser"], make_inputs(2), torch.cuda.Stream()
        expected = [denoiser(*make_inputs(2, seed)) for seed in range(3)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            denoiser(*inputs)
            denoiser(*make_inputs(1))  # of the same profile
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(UserError, match="not ready to be recorded"), torch.cuda.graph(graph, stream=stream):
                denoiser(*inputs)
            denoiser(*inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                output = denoiser(*inputs)
        for seed in range(3):
            for busy in (stream, torch.cuda.Stream(), torch.cuda.Stream()):
                with torch.cuda.stream(busy):
                    for batch in (1, 4, 16):
                        denoiser(*make_inputs(batch))
            torch.cuda.synchronize()
            for mine, new in zip(inputs, make_inputs(2, seed), strict=True):
                mine.copy_(new)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(output, expected[seed])


def test_the_callers_own_graph_may_run_beside_calls(denoiser):
    """Launched on another stream while calls run on the one that it was recorded on: neither computes in the other's memory."""
    recorded, called = make_inputs(16), make_inputs(16, seed=1)
    expected = [denoiser(*inputs) for inputs in (recorded, called)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        denoiser(*recorded)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            output = denoiser(*recorded)
    torch.cuda.synchronize()
    given: list[list[torch.Tensor]] = [[], []]
    for _ in range(300):
        with torch.cuda.stream(streams[0]):
            given[1].append(denoiser(*called))
        with torch.cuda.stream(streams[1]):
            graph.replay()
            given[0].append(output.clone())
    torch.cuda.synchronize()
    for outputs, right in zip(given, expected, strict=True):
        assert all(torch.equal(x, right) for x in outputs)


def test_a_recording_gives_its_memory_back(denoiser):
    """It is the graph's, however often a call is recorded."""
    inputs, stream = make_inputs(), torch.cuda.Stream()

    def record() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                denoiser(*inputs)

    with torch.cuda.stream(stream):
        denoiser(*inputs)
        record()
        before = held()
        for _ in range(20):
            record()
    assert held() <= before


# Whom it serves -------------------------------------------------------------------------------------------------------


def test_threads_and_streams_do_not_disturb_each_other(folder):
    """More streams than keep their contexts, so that lanes close and open while others run."""
    with runtime.load(folder, backend="tensorrt", streams=2) as bundle:
        denoiser = bundle["denoiser"]
        sets = [make_inputs(batch, seed) for seed in range(4) for batch in (1, 2, 4)]
        expected = [denoiser(*inputs) for inputs in sets]
        torch.cuda.synchronize()
        shared, failures = torch.cuda.Stream(), []

        def work(number: int) -> None:
            stream = shared if number % 2 else torch.cuda.Stream()
            try:
                with torch.cuda.stream(stream):
                    for i in range(20):
                        index = (i * 7 + number) % len(sets)
                        output = denoiser(*sets[index])
                        if not torch.equal(output, expected[index]):
                            failures.append((number, i))
            except Exception as error:
                failures.append((number, error))

        at_once(work, range(6))
        assert not failures


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bundles_on_two_gpus_serve_at_once(folder, denoiser, digits):
    """From threads whose current GPU is the first, where nothing of the second bundle lies."""
    sets = [make_inputs(batch, seed) for batch in (2, 16) for seed in range(2)]
    expected = [denoiser(*inputs).cpu() for inputs in sets]
    with runtime.load(folder, backend="tensorrt", device="cuda:1") as second:
        there, failures = second["denoiser"], []
        moved = [[x.to("cuda:1") for x in inputs] for inputs in sets]

        def work(calls: tuple[TensorRTComponent, list[list[torch.Tensor]]]) -> None:
            called, given = calls
            try:
                for i in range(40):
                    output = called(*given[i % len(given)])
                    if output.device != called.device or not torch.equal(output.cpu(), expected[i % len(given)]):
                        failures.append((called.device, i))
            except Exception as error:
                failures.append((called.device, error))

        on_first = held()
        at_once(work, [(there, moved)])
        assert not failures and held() <= on_first
        at_once(work, [(denoiser, sets), (there, moved)])
        assert not failures
        assert there.graphs_recorded and torch.cuda.current_device() == 0
        for inputs, output in zip(sets, expected, strict=True):  # taken from the first GPU, and given back there
            given_back = there(*inputs)
            assert given_back.device == inputs[0].device and torch.equal(given_back.cpu(), output)
        there.refit(digits.denoiser.state_dict())
        work((there, moved))
        assert not failures
        moved.clear()
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.memory_allocated("cuda:1") == 0


def two_engines(folder: Path, **options: int) -> tuple[Scratch, list[TensorRTComponent]]:
    """Of the denoiser, in one scratch memory."""
    component = read_manifest(folder).components["denoiser"]
    (record,) = component.engines
    scratch = Scratch(torch.device("cuda", 0))
    where = {"device": scratch.device, "scratch": scratch}
    return scratch, [TensorRTComponent(folder / record.file, record, component, **where, **options) for _ in range(2)]


def test_engines_of_a_bundle_share_their_memory(folder):
    """Two engines on one stream: one buffer, and each computes what it does alone."""
    scratch, engines = two_engines(folder)
    small, large = make_inputs(1), make_inputs(16)
    expected = [engines[0](*small), engines[0](*large)]
    for _ in range(4):
        assert torch.equal(engines[1](*small), expected[0])
        assert torch.equal(engines[0](*large), expected[1])
    assert scratch.allocated == scratch.size == engines[0].device_memory
    for engine in engines:
        engine.close()
    assert scratch.allocated == 0


def test_engines_on_one_stream_do_not_mix_their_kernels(folder):
    """From a thread each: they compute in one memory."""
    _, engines = two_engines(folder, graphs=0)
    sets = [make_inputs(batch) for batch in (16, 5)]
    expected = [engines[0](*inputs) for inputs in sets]
    torch.cuda.synchronize()
    wrong = []

    def work(number: int) -> None:
        for i in range(300):
            output = engines[number](*sets[i % 2])
            if not torch.equal(output, expected[i % 2]):
                wrong.append((number, i))

    at_once(work, range(2))
    for engine in engines:
        engine.close()
    assert not wrong


def test_memory_is_reported(loaded, denoiser):
    memory = loaded.device_memory
    assert memory.weights > WEIGHTS.stat().st_size / 4  # FP16 of a part of FP32 at the least
    assert memory.per_stream == denoiser.device_memory and memory.streams == 0
    denoiser(*make_inputs())
    assert loaded.device_memory.streams == memory.per_stream


def test_weights_are_streamed_within_a_budget(tmp_path):
    """Whatever stays on the GPU, the outputs are the same bits."""
    engine = {"backend": "tensorrt", "attention": "plugin", "weight_streaming": True}
    recipe = tiny_recipe(tmp_path, model={"dtype": "float16"}, engine=engine)
    build(load_recipe(recipe), tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    inputs = [torch.randn(2, 1, 4, 4).cuda().half(), torch.tensor([10.0, 900.0]).cuda()]
    outputs = []
    for budget in (None, 0, 2**30):
        with runtime.load(tmp_path / "bundle", backend="tensorrt", weight_budget=budget) as bundle:
            outputs.append([bundle["denoiser"](*inputs) for _ in range(3)][-1])
            if budget is not None:
                assert bundle["denoiser"].engine.weight_streaming_budget_v2 <= budget
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


# What it leaves behind ------------------------------------------------------------------------------------------------


def test_ten_thousand_calls_leave_nothing(denoiser):
    sets = [make_inputs(batch) for batch in (1, 2, 3, 8)]

    def calls(count: int) -> None:
        for i in range(count):
            denoiser(*sets[i % len(sets)])

    calls(1_000)
    device, tensors, host = held(), torch.cuda.memory_allocated(), resident()
    calls(10_000)
    assert held() <= device and torch.cuda.memory_allocated() == tensors
    assert resident() - host < CALLS_GROWTH


def test_a_hundred_loads_leave_nothing(folder):
    def cycle() -> None:
        with runtime.load(folder, backend="tensorrt") as bundle:
            for _ in range(3):
                bundle["denoiser"](*make_inputs())

    for _ in range(10):
        cycle()
    device, host = held(), resident()
    for _ in range(100):
        cycle()
    assert held() - device < LOADS_GROWTH and resident() - host < LOADS_GROWTH


def test_a_closed_bundle_is_not_called(folder):
    bundle = runtime.load(folder, backend="tensorrt")
    inputs = make_inputs()
    bundle["denoiser"](*inputs)
    bundle.close()
    bundle.close()
    with pytest.raises(UserError, match=r"was closed"):
        bundle["denoiser"](*inputs)


# New weights ----------------------------------------------------------------------------------------------------------


def test_new_weights_take_effect_and_old_ones_come_back(denoiser, digits, tmp_path):
    inputs = make_inputs(4)
    for _ in range(3):  # the graph must not keep the old weights
        before = denoiser(*inputs)
    old = {name: x.clone() for name, x in digits.denoiser.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    new = {
        name: x + 0.2 * x.std() * torch.randn(x.shape, generator=generator) if x.dim() > 1 else x
        for name, x in old.items()
    }
    path = tmp_path / "tuned.safetensors"
    save_file(new, path)
    assert denoiser.refit(path) == len(new)
    changed = [denoiser(*inputs) for _ in range(3)][-1]
    digits.denoiser.load_state_dict(new)
    try:
        expected = digits.denoiser(*[x.cpu().float() if x.is_floating_point() else x.cpu() for x in inputs])
    finally:
        digits.denoiser.load_state_dict(old)
    error = relative_error(changed.cpu(), expected)
    assert error < relative_error(before.cpu(), expected) / 3
    denoiser.refit(old)
    assert torch.equal(denoiser(*inputs), before)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(denoiser, digits):
    inputs, state = make_inputs(), digits.denoiser.state_dict()
    before = denoiser(*inputs)
    name = "blocks.0.attn.qkv.weight"
    for weights, parts in (
        ({"blocks.0.attn.qkw.weight": state[name]}, ("no weight", "perhaps blocks.0.attn.qkv.weight")),
        ({name: state[name][:-1]}, ("does not fit",)),
        ({name: state[name] * float("nan")}, ("finite numbers",)),
        ({name: state[name] * 1e9}, ("finite numbers that float16 holds",)),
    ):
        with pytest.raises(UserError) as error:
            denoiser.refit(weights)
        for part in ("expected: ", "got: ", "remedy: ", *parts):
            assert part in str(error.value)
    assert torch.equal(denoiser(*inputs), before)


# What it refuses ------------------------------------------------------------------------------------------------------


def test_sizes_outside_every_profile_are_refused(denoiser):
    with pytest.raises(UserError, match=r"(?s)shape of 'x'.*batch 1\.\.16.*got: \[17, 1, 8, 8\]"):
        denoiser(*make_inputs(17))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("target", "sm80", "a GPU of sm80"), ("library", "10.5.0", "TensorRT 10.5.0"), ("plugin", "99.0.0", "99.0.0")],
)
def test_an_engine_for_another_machine_is_refused_unread(folder, tmp_path, field, value, expected):
    """The plan is replaced by rubbish: TensorRT never sees it."""
    manifest = read_manifest(folder)
    component = manifest.components["denoiser"]
    record = component.engines[0].model_copy(update={field: value})
    (tmp_path / "engines").mkdir()
    (tmp_path / record.file).write_bytes(b"rubbish")
    (tmp_path / component.onnx).write_bytes((folder / component.onnx).read_bytes())
    changed = component.model_copy(update={"engines": [record]})
    write_manifest(tmp_path, manifest.model_copy(update={"components": {"denoiser": changed}, "digest": ""}))
    with pytest.raises(BackendUnavailable, match=rf"(?s)for another machine.*{expected}.*trtconvert compile"):
        runtime.load(tmp_path)


def test_a_plan_that_tensorrt_does_not_read_is_refused(folder, tmp_path):
    component = read_manifest(folder).components["denoiser"]
    (record,) = component.engines
    path = tmp_path / "cut.plan"
    path.write_bytes((folder / record.file).read_bytes()[:100_000])
    device = torch.device("cuda", 0)
    with pytest.raises(BackendUnavailable, match=r"(?s)cannot load cut\.plan.*got: .*remedy: .*trtconvert compile"):
        TensorRTComponent(path, record, component, device=device, scratch=Scratch(device))


def test_a_weight_budget_is_for_engines_that_stream(folder):
    with pytest.raises(UserError, match=r"(?s)keeps all its weights.*weight_streaming"):
        runtime.load(folder, backend="tensorrt", weight_budget=2**20)


def test_a_full_gpu_is_named_with_what_is_needed(folder, loaded, denoiser):
    """Room for nothing: neither for a context of what is loaded, nor for loading."""
    inputs = make_inputs()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    blocks = [torch.empty(free - 2**28, dtype=torch.uint8, device="cuda")]
    try:
        while True:
            blocks.append(torch.empty(2**20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    scratch = Scratch(torch.device("cuda", 0))
    scratch.reserve(2**28)
    with pytest.raises(BackendUnavailable, match=r"(?s)no memory left.*expected: 256 MiB.*remedy: "):
        scratch.on(torch.cuda.current_stream())
    opened = []  # TensorRT's own pool may still have room for some
    with pytest.raises(BackendUnavailable, match=r"(?s)expected: .*got: .*remedy: "):
        while len(opened) < 200:
            opened.append(runtime.load(folder, backend="tensorrt"))
    for bundle in opened:
        bundle.close()
    blocks.clear()
    torch.cuda.empty_cache()
    assert denoiser(*inputs).isfinite().all()
