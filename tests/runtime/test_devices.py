"""A bundle on several devices that share the samples of a call. Sessions on the CPU stand in for the devices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support import run
from tolerances import SAME_ARITHMETIC
from torch import Tensor

from trtconvert import runtime
from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.digits import draw_digits
from trtconvert.models.recorded_calls import relative_error
from trtconvert.models.samplers import initial_noise, sample
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.devices import DataParallel
from trtconvert.runtime.signature import Signature
from trtconvert.wrapped import apart, begin

X = TensorRecord(name="x", dtype="float32", shape=["batch", "width"])
TIMESTEP = TensorRecord(name="timestep", dtype="float32", shape=["batch"])
FRAMES = TensorRecord(name="frames", dtype="float32", shape=["batch_2", 1])
TABLE = TensorRecord(name="table", dtype="float32", shape=["width"])


class Part:
    """Stands in for a session: adds all inputs, and counts the calls of a trajectory."""

    device = torch.device("cpu")
    weights_memory, graphs_memory, graphs_recorded, caches_memory = 5, 4, 3, 2

    def __init__(self, batch=(1, 2, 4), meet: threading.Barrier | None = None, fails: Exception | None = None) -> None:
        dims = {"batch": batch, "batch_2": tuple(3 * size for size in batch), "width": (1, 2, 4)}
        record = ComponentRecord(
            onnx="x.onnx", inputs=[X, TIMESTEP, FRAMES, TABLE], outputs=[X], timestep_input="timestep", timestep_max=1.0,
            dims=dims, engines=[],
        )  # fmt: skip
        self.signature, self.sizes, self.calls = Signature(record), list[int](), dict[Any, int]()
        self.meet, self.fails, self.changed, self.closed = meet, fails, list[Any](), False

    def call(self, trajectory, inputs, named):
        x, timestep, frames, table = inputs
        self.signature.check(inputs)
        if self.meet is not None:
            self.meet.wait(20)  # breaks where the others do not run meanwhile
        self.sizes.append(len(x))
        self.calls[trajectory] = self.calls.get(trajectory, 0) + 1
        if self.fails is not None:
            raise self.fails
        return x + timestep[:, None] + frames.view(len(x), 3).sum(1, keepdim=True) + table + self.calls[trajectory]

    def reset_cache(self, trajectory=None):
        self.calls.pop(trajectory, None)

    def check_caches(self):
        if self.fails is not None:
            raise self.fails

    def refit(self, weights):
        if self.fails is not None:
            raise self.fails
        self.changed.append(weights)
        return 7

    set_loras = refit

    def close(self):
        self.closed = True


def inputs_of(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(count, 2), torch.rand(count), torch.randn(3 * count, 1), torch.randn(2)


def expected_of(inputs: tuple[Tensor, ...], calls: int = 1) -> Tensor:
    x, timestep, frames, table = inputs
    return x + timestep[:, None] + frames.view(len(x), 3).sum(1, keepdim=True) + table + calls


@pytest.mark.parametrize(
    ("batch", "devices", "count", "sizes"),
    [
        ((1, 2, 4), 2, 4, [2, 2]),
        ((1, 2, 4), 2, 5, [3, 2]),
        ((1, 2, 4), 3, 8, [3, 3, 2]),
        ((1, 2, 4), 3, 2, [1, 1, 0]),  # the rest idle
        ((1, 2, 4), 2, 1, [1, 0]),
        ((2, 2, 4), 2, 3, [3, 0]),  # two devices would get one of them less than their engine takes
        ((4, 4, 4), 2, 8, [4, 4]),
    ],
)
def test_samples_are_shared_out_evenly(batch, devices, count, sizes):
    parts = [Part(batch) for _ in range(devices)]
    inputs = inputs_of(count)
    assert torch.equal(DataParallel(parts)(*inputs[:2], table=inputs[3], frames=inputs[2]), expected_of(inputs))
    assert [sum(part.sizes) for part in parts] == sizes


def test_more_samples_than_all_devices_take_go_in_turns():
    parts = [Part((4, 4, 4)) for _ in range(2)]
    with pytest.raises(UserError, match="no optimisation profile of the engine holds"):
        DataParallel(parts)(*inputs_of(6))
    # AnyBatch fills up what is too small for one call. It knows no rows for frames.
    x, timestep, frames, table = inputs_of(8)
    drawn = AnyBatch(DataParallel(parts))(x, timestep, frames, table)
    assert len(drawn) == 8 and parts[1].sizes == [4]


@pytest.mark.parametrize("rows", [11, 3])
def test_rows_that_cannot_be_shared_out_are_told(rows):
    x, timestep, _, table = inputs_of(4)
    parts = [Part(), Part()]
    with pytest.raises(UserError, match=rf"'frames' does not have a row(.|\n)*4 rows, or a(.|\n)*\[{rows}, 1\]"):
        DataParallel(parts)(x, timestep, torch.randn(rows, 1), table)
    assert not parts[0].sizes


def test_parts_run_at_the_same_time():
    meet = threading.Barrier(3)
    inputs = inputs_of(6)
    parts = DataParallel([Part(meet=meet) for _ in range(3)])
    with torch.inference_mode():
        assert torch.equal(parts(*inputs), expected_of(inputs))


def test_a_failure_names_its_device_after_the_others_finish():
    failing = UserError("it does not fit", expected="this", got="that", remedy="do something")
    parts = [Part(), Part(fails=failing), Part(fails=BackendUnavailable("no memory"))]
    together = DataParallel(parts)
    with pytest.raises(
        UserError, match=r"on cpu: it does not fit\n  expected: this\n  got: that\n  remedy: do something"
    ):
        together(*inputs_of(3))
    assert [part.sizes for part in parts] == [[1], [1], [1]]
    parts[1].fails, parts[2].fails = None, ValueError("strange")
    with pytest.raises(ValueError, match="strange") as error:
        together(*inputs_of(3))
    assert error.value.__notes__ == ["on cpu"]
    parts[2].fails = None
    assert len(together(*inputs_of(3))) == 3  # the devices are there as before


def test_a_missing_device_is_named_before_any_part_runs():
    parts = [Part(), Part(), Part()]
    parts[2].device = torch.device("cuda:77")
    with pytest.raises(Exception) as error:  # torch has one for each reason why there is no such GPU
        DataParallel(parts)(*inputs_of(3))
    assert error.value.__notes__ == ["on cuda:77"] and not any(part.sizes for part in parts)


def test_caches_stay_with_their_samples():
    parts = [Part(), Part()]
    together = DataParallel(parts)
    other, three, four = apart(together), inputs_of(3), inputs_of(4)
    assert torch.equal(together(*three), expected_of(three, calls=1))
    assert torch.equal(together(*three), expected_of(three, calls=2))
    assert torch.equal(other(*three), expected_of(three, calls=1))
    # Of four the first device has two as before, and the others are none of the three: all begin anew.
    assert torch.equal(together(*four), expected_of(four, calls=1))
    assert torch.equal(together(*four), expected_of(four, calls=2))
    begin(together)
    assert torch.equal(together(*four), expected_of(four, calls=1))
    assert torch.equal(other(*three), expected_of(three, calls=2))
    parts[1].fails = UserError("NaN")
    with pytest.raises(UserError, match="on cpu: NaN"):
        together.check_caches()


def test_weights_change_on_all_devices_or_on_none():
    parts = [Part(), Part()]
    together = DataParallel(parts)
    assert together.refit({"w": torch.zeros(1)}) == together.set_loras([]) == 7
    assert len(parts[0].changed) == len(parts[1].changed) == 2
    parts[0].record, parts[1].record = (type("Record", (), {"refittable": known})() for known in (True, False))
    parts[1].fails = UserError("not refittable")
    with pytest.raises(UserError, match="on cpu: not refittable"):
        together.refit({})
    assert len(parts[0].changed) == 2 and not parts[0].closed
    parts[1].record = parts[0].record
    with pytest.raises(UserError, match="on cpu: not refittable"):
        together.refit({})
    assert parts[0].closed and parts[1].closed  # of two engines with different weights nobody shall see samples
    with pytest.raises(UserError, match="closed"):
        together(*inputs_of(4))


def test_memory_is_that_of_all_devices():
    together = DataParallel([Part(), Part()])
    assert (together.weights_memory, together.graphs_memory, together.graphs_recorded, together.caches_memory) == (
        10,
        8,
        6,
        4,
    )


def test_a_fixed_batch_is_refused():
    part = Part()
    fixed = [spec.model_copy(update={"shape": [4, *spec.shape[1:]]}) for spec in part.signature.component.inputs[:1]]
    part.signature.component = part.signature.component.model_copy(update={"inputs": fixed})
    with pytest.raises(UserError, match=r"cannot share the denoiser(.|\n)*exactly 4(.|\n)*one device"):
        DataParallel([part, part])


# Bundles --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two(digits_build):
    with runtime.load(digits_build.bundle, devices=["cpu", "cpu"], check=True) as bundle:
        yield bundle


def test_a_bundle_on_two_devices_draws_the_same(digits_build, on_two):
    """Two engines for a batch of eight take a batch of sixteen."""
    one = runtime.load(digits_build.bundle, device="cpu")
    assert on_two.backend.endswith("; samples shared by 2 sessions") and on_two["denoiser"].signature.watch is not None
    assert on_two["denoiser"].signature.batches([torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.zeros(1)]) == (2, 16)
    seeds = range(5)
    expected = draw_digits(AnyBatch(one["denoiser"]), seeds, steps=2, solver="ddim")
    assert relative_error(draw_digits(on_two["denoiser"], seeds, steps=2, solver="ddim"), expected) < SAME_ARITHMETIC


def test_each_half_of_guidance_has_a_device(digits_build, on_two):
    from trtconvert.models.digits import _SCHEDULE

    label, seen = torch.tensor([3]), list[Tensor]()
    watched = on_two["denoiser"]._parts[1]
    call = watched.call

    def seeing(trajectory, inputs, named):
        seen.append(inputs[2])
        return call(trajectory, inputs, named)

    def drawn(denoiser: Any) -> Tensor:
        return sample(
            denoiser, initial_noise([1], (1, 8, 8)), _SCHEDULE, prediction="v_prediction", steps=2, guidance=3.0,
            conditions={"label": label}, null_conditions={"label": torch.tensor([10])},
        )  # fmt: skip

    watched.call = seeing
    try:
        found = drawn(on_two["denoiser"])
    finally:
        watched.call = call
    assert [x.tolist() for x in seen] == [[3], [3]]  # the conditional half; the other one is on the first device
    assert relative_error(found, drawn(runtime.load(digits_build.bundle, device="cpu")["denoiser"])) < SAME_ARITHMETIC


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_caches_of_some_samples_alone_cannot_be_forgotten(digits_build, devices):
    denoiser = runtime.load(digits_build.bundle, devices=devices)["denoiser"]
    denoiser.reset_cache()
    with pytest.raises(
        UserError, match=r"all samples of a trajectory(.|\n)*reset_cache\(\[1\]\)(.|\n)*leave the argument out"
    ):
        denoiser.reset_cache([1])  # type: ignore[arg-type]


def test_the_command_takes_devices(digits_build, tmp_path):
    outcome = run("run", digits_build.bundle, "-n", 3, "--steps", 2, "--devices", "cpu,cpu", "-o", tmp_path / "x.png")
    assert outcome.exit_code == 0 and "shared by 2 sessions" in " ".join(outcome.output.split()), outcome.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"devices": ["cuda:0", "cuda:0"]}, "the device cuda:0 was given twice"),
        ({"devices": [0, torch.device("cuda", 0)]}, "the device cuda:0 was given twice"),
        ({"devices": ["cpu", "cuda:0"]}, "must be all GPUs or all the CPU"),
        ({"devices": ["gpu0"]}, "there is no device 'gpu0'"),
        ({"devices": []}, "a list of one or more"),
        ({"devices": "cuda:0"}, "a list of one or more"),
        ({"devices": 0.5}, "a list of one or more"),
        ({"devices": b"cpu"}, "a list of one or more"),
        ({"devices": {"cpu", "cuda:0"}}, "a list of one or more"),
        ({"devices": ["cpu"], "device": "cpu"}, "device and devices exclude"),
    ],
)
def test_devices_that_cannot_be_are_refused(digits_build, arguments, told):
    with pytest.raises(UserError, match=rf"{told}(.|\n)*expected: (.|\n)*remedy: correct the argument devices"):
        runtime.load(digits_build.bundle, **arguments)


@pytest.mark.parametrize("device", ["", " ", "gpu", 0.5])
def test_a_device_that_torch_does_not_know_is_refused(digits_build, device):
    """Without a GPU too, so that the message is about the name."""
    with pytest.raises(
        UserError, match=rf"there is no device {device!r}(.|\n)*remedy: correct the argument device"
    ) as error:
        runtime.load(digits_build.bundle, device=device)
    assert error.value.got == f"device={device!r}"


def test_several_devices_are_another_argument(digits_build):
    with pytest.raises(UserError, match=r"several, as devices=(.|\n)*remedy: correct the argument device"):
        runtime.load(digits_build.bundle, device=["cuda:0"])  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is asked for one")
def test_gpus_that_are_not_there_are_refused(digits_build):
    with pytest.raises(BackendUnavailable, match="cannot run on 'cuda:0'"):
        runtime.load(digits_build.bundle, devices=["cuda:0", "cuda:1"])
