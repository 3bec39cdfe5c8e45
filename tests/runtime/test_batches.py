"""Batches that an engine does not take at once."""

import pytest
import torch
from support import refusal, run, tiny_recipe

from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.errors import UserError
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.signature import Signature

X = TensorRecord(name="x", dtype="float32", shape=["batch", "width"])
TIMESTEP = TensorRecord(name="timestep", dtype="float32", shape=["batch"])
TABLE = TensorRecord(name="table", dtype="float32", shape=["width"])


class Recording:
    """Stands in for an engine with a range of batches."""

    device = torch.device("cpu")

    def __init__(self, *profiles):
        dims = {"batch": (1, 2, 9), "width": (1, 2, 4)}
        record = ComponentRecord(
            onnx="x.onnx", inputs=[X, TIMESTEP, TABLE], outputs=[X], timestep_input="timestep", timestep_max=1.0,
            dims=dims, engines=[],
        )  # fmt: skip
        self.signature, self.sizes = Signature(record, [dims | dict(p) for p in profiles]), []

    def __call__(self, x, timestep, table):
        self.signature.check([x, timestep, table])
        self.sizes.append(len(x))
        return x + timestep[:, None] + table


@pytest.mark.parametrize(
    ("profiles", "count", "sizes"),
    [
        ([{"batch": (1, 2, 4)}], 5, [4, 1]),
        ([{"batch": (1, 2, 4)}], 4, [4]),
        ([{"batch": (4, 4, 4)}], 5, [4, 4]),
        ([{"batch": (3, 4, 4)}], 2, [3]),
        ([{"batch": (2, 2, 4)}], 13, [4, 4, 4, 2]),
        ([{"batch": (1, 1, 2)}, {"batch": (1, 2, 3)}], 5, [3, 2]),
        ([{"batch": (1, 1, 2)}, {"batch": (1, 2, 9), "width": (4, 4, 4)}], 5, [2, 2, 1]),
    ],
)
def test_batches_that_are_not_taken_go_in_parts(profiles, count, sizes):
    component = Recording(*profiles)
    x, timestep, table = torch.randn(count, 2), torch.rand(count), torch.randn(2)
    assert torch.equal(AnyBatch(component)(x, table=table, timestep=timestep), x + timestep[:, None] + table)
    assert component.sizes == sizes


@pytest.mark.parametrize(("batch", "count", "sizes"), [((1, 2, 4), 5, [4, 1]), ((3, 4, 4), 2, [3])])
def test_rows_of_a_samples_frames_stay_with_it(batch, count, sizes):
    """AnimateDiff's prompts have a row for each frame."""
    frames = TensorRecord(name="frames", dtype="float32", shape=["batch_2", "width"])
    record = ComponentRecord(
        onnx="x.onnx", inputs=[X, TIMESTEP, frames], outputs=[X], timestep_input="timestep", timestep_max=1.0,
        dims={"batch": batch, "batch_2": tuple(3 * size for size in batch), "width": (1, 2, 4)}, engines=[],
    )  # fmt: skip
    given = list[int]()

    class Frames:
        device, signature = torch.device("cpu"), Signature(record)

        def __call__(self, x, timestep, frames):
            self.signature.check([x, timestep, frames])
            given.append(len(x))
            return x + timestep[:, None] + frames.unflatten(0, (len(x), 3)).sum(1)

    x, timestep, rows = torch.randn(count, 2), torch.rand(count), torch.randn(3 * count, 2)
    expected = x + timestep[:, None] + rows.unflatten(0, (count, 3)).sum(1)
    torch.testing.assert_close(AnyBatch(Frames())(x, timestep, rows), expected)
    assert given == sizes


def test_component_refuses_inputs_without_a_batch():
    drawn = AnyBatch(Recording({"batch": (1, 2, 4)}))
    sizes = [((5, 2), 3), ((5, 7), 5), ((0, 2), 0)]
    for x, timestep in ((torch.zeros(of_x), torch.zeros(of_timestep)) for of_x, of_timestep in sizes):
        with pytest.raises(UserError, match="remedy: "):
            drawn(x, timestep, torch.zeros(x.shape[1]))


def test_more_samples_are_verified_and_drawn_than_the_engine_takes_at_once(tmp_path):
    """Five samples for an engine of exactly four."""
    recipe = tiny_recipe(tmp_path, verify={"samples": 5}, engine={"shapes": {"batch": 4}})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "PSNR" in run("inspect", tmp_path / "bundle").output
    drawn = run("run", tmp_path / "bundle", "-n", 6, "--steps", 2, "-o", tmp_path / "samples.png")
    assert drawn.exit_code == 0 and "6 samples" in drawn.output, drawn.output
    refusal(
        run("run", tmp_path / "bundle", "-o", tmp_path / "bundle" / "denoiser.onnx.png"),
        "would change the bundle",
    )
