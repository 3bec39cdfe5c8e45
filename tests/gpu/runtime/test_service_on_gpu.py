"""Loaded TensorRT engines: whom they serve at once, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_loras
import torch
from gpu_runtime import held, make_inputs, resident
from rich.console import Console
from safetensors.torch import save_file
from support import WEIGHTS, at_once, tiny_recipe

from trtconvert import runtime
from trtconvert.bundle import read_manifest, write_manifest
from trtconvert.cache import Cache
from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.recorded_calls import relative_error
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]


LOADS_GROWTH = 32 * 2**20
"""Bytes over a hundred loads. What allocators and the driver round up to; an engine that stays is 3 MiB or more each time."""


CALLS_GROWTH = 4 * 2**20
"""Bytes of host memory over ten thousand calls: 400 each. A tensor that is kept takes twice as many."""


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
    """Contexts of the denoiser share one scratch memory."""
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


def test_memory_of_the_weights_is_reported(folder):
    """A process of its own loads the engine: elsewhere the driver may reuse memory of closed engines, and report no change."""
    code = "import sys; from trtconvert import runtime; print(runtime.load(sys.argv[1]).device_memory.weights)"
    printed = subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True
    ).stdout
    assert int(printed) > WEIGHTS.stat().st_size / 4  # FP16 of a part of FP32 at the least


def test_memory_is_reported(loaded, denoiser):
    memory = loaded.device_memory
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


@pytest.mark.soak
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


@pytest.mark.soak
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


def test_loras_take_effect_and_go_again(denoiser, digits, tmp_path):
    inputs = make_inputs(4)
    for _ in range(3):  # the graph must not keep the old weights
        before = denoiser(*inputs)
    old = {name: x.clone() for name, x in digits.denoiser.state_dict().items()}
    names = [name.removesuffix(".weight") for name, x in old.items() if name.endswith(".attn.qkv.weight")]
    layers = tiny_loras.layers_of(digits.denoiser, names)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.peft(""))
    assert denoiser.set_loras([(file, 1.0)]) == len(names)
    changed = [denoiser(*inputs) for _ in range(3)][-1]
    merged = tiny_loras.with_deltas(old, {name: layer.delta() for name, layer in layers.items()}, 1.0)
    digits.denoiser.load_state_dict(merged)
    try:
        expected = digits.denoiser(*[x.cpu().float() if x.is_floating_point() else x.cpu() for x in inputs])
    finally:
        digits.denoiser.load_state_dict(old)
    error = relative_error(changed.cpu(), expected)
    assert error < relative_error(before.cpu(), expected) / 3
    assert denoiser.set_loras([]) == len(names)
    assert torch.equal(denoiser(*inputs), before)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(denoiser, digits):
    inputs, state = make_inputs(), digits.denoiser.state_dict()
    before = denoiser(*inputs)
    name = "blocks.0.attn.qkv.weight"
    for weights, parts in (
        ({"blocks.0.attn.qkw.weight": state[name]}, ("no weight", "perhaps blocks.0.attn.qkv.weight")),
        ({name: state[name][:-1]}, ("does not fit",)),
        ({name: state[name] * float("nan")}, ("finite numbers",)),
        ({name: state[name] * 1e9}, ("finite numbers in the range of float16",)),
    ):
        with pytest.raises(UserError) as error:
            denoiser.refit(weights)
        for part in ("expected: ", "got: ", "remedy: ", *parts):
            assert part in str(error.value)
    assert torch.equal(denoiser(*inputs), before)


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
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / record.file).write_bytes(b"rubbish")
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
    with pytest.raises(UserError, match=r"(?s)cannot stream its weights.*weight_streaming"):
        runtime.load(folder, backend="tensorrt", weight_budget=2**20)


def test_a_full_gpu_is_named_with_what_is_needed(folder, loaded, denoiser):
    """No free memory: neither for a context of a loaded engine, nor for a load."""
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
