"""The demonstration model: its computation, the images of its weights, and the weights that it refuses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REPOSITORY
from torch.nn import functional as F

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.errors import UserError
from trtconvert.evaluate.classifier import accuracy, digits_data, load_digits_classifier
from trtconvert.models.checkpoint import save_weights
from trtconvert.models.digits_dit import (
    BETA_SCHEDULE,
    CLASSES,
    IMAGE_SHAPE,
    NULL_LABEL,
    PREDICTION,
    TIMESTEPS,
    DigitsDiT,
    grid_positions,
    load_digits_dit,
    sinusoids,
)
from trtconvert.models.samplers import initial_noise, sample

RECIPES = REPOSITORY / "recipes"
MODEL, CLASSIFIER = RECIPES / "digits-dit.safetensors", RECIPES / "digits-classifier.safetensors"


def inputs(batch: int, height: int = 8, width: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 1, height, width, generator=generator)
    return x, torch.linspace(0, 999, batch), torch.arange(batch) % (CLASSES + 1)


def draw(count: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % CLASSES
    schedule = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))
    noise = initial_noise(range(count), IMAGE_SHAPE)
    model = load_digits_dit(MODEL)
    return sample(model, noise, schedule, prediction=PREDICTION, steps=steps, conditions={"label": labels}), labels


@pytest.mark.soak
def test_shipped_weights_draw_the_digits_asked_for():
    images, labels = draw(200, steps=25)
    assert accuracy(load_digits_classifier(CLASSIFIER), images, labels) >= 0.9
    # One image per class would satisfy the classifier; digits of a class must differ, like real digits.
    real, real_labels = digits_data("test")
    for digit in range(CLASSES):
        spread, real_spread = (
            torch.pdist(group.flatten(1)).mean() for group in (images[labels == digit], real[real_labels == digit])
        )
        assert spread > 0.5 * real_spread


def test_sampling_is_deterministic():
    first, second = draw(8, steps=4)[0], draw(8, steps=4)[0]
    assert torch.equal(first, second)


def test_shipped_classifier_reads_digits_it_was_not_trained_on():
    assert accuracy(load_digits_classifier(CLASSIFIER), *digits_data("test")) >= 0.97


def test_shipped_files_are_small():
    assert MODEL.stat().st_size <= 8_000_000
    assert CLASSIFIER.stat().st_size <= 1_000_000


def test_splits_share_no_image():
    train, test = digits_data("train")[0], digits_data("test")[0]
    assert len(train) + len(test) == 1797
    assert torch.cdist(train.flatten(1), test.flatten(1)).min() > 0


def test_attention_sites_have_the_shape_the_design_asks_for(monkeypatch):
    shapes = []

    def recorded(q, k, v):
        shapes.append((q.shape, k.shape, v.shape))
        return attention(q, k, v)

    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    DigitsDiT()(*inputs(3))
    assert shapes == [((3, 2, 64, 64),) * 3] * 6  # [B, heads, N, D], six blocks


def test_every_input_matters():
    model = load_digits_dit(MODEL)
    x, timestep, label = inputs(4)
    out = model(x, timestep, label)
    for changed in ((x.flip(2), timestep, label), (x, timestep.flip(0), label), (x, timestep, label + 1)):
        assert (model(*changed) - out).abs().amax((1, 2, 3)).min() > 1e-3


def test_null_label_differs_from_every_class():
    model = load_digits_dit(MODEL)
    x, timestep = inputs(1)[0], torch.tensor([300.0])
    rows = [model(x, timestep, torch.tensor([label])).flatten() for label in range(NULL_LABEL + 1)]
    assert torch.pdist(torch.stack(rows)).min() > 1e-3


def test_batch_elements_do_not_mix():
    model = load_digits_dit(MODEL)
    x, timestep, label = inputs(5)
    one_by_one = torch.cat([model(x[i : i + 1], timestep[i : i + 1], label[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(model(x, timestep, label), one_by_one, rtol=1e-4, atol=1e-5)


def test_positions_tell_all_pixels_apart_and_extend():
    table = grid_positions(12, 9, 128, torch.device("cpu"))
    assert table.shape == (108, 128)
    assert torch.pdist(table).min() > 0.1
    # A pixel keeps its features when the image grows.
    small = grid_positions(8, 8, 128, torch.device("cpu"))
    torch.testing.assert_close(table.view(12, 9, 128)[:8, :8], small.view(8, 8, 128))


def test_sinusoids_at_known_angles():
    features = sinusoids(torch.tensor([0.0, torch.pi / 2]), 4)  # frequencies 1 and 1/100
    quarter = torch.tensor(torch.pi / 200)
    expected = torch.tensor([[0, 0, 1, 1], [1, quarter.sin(), 0, quarter.cos()]])
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-6)


def test_exports_with_dynamic_batch_and_size():
    model = load_digits_dit(MODEL)
    batch, height, width = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "height", "width"))
    program = torch.export.export(
        model, inputs(3), dynamic_shapes=({0: batch, 2: height, 3: width}, {0: batch}, {0: batch})
    )
    for shape in ((2, 8, 8), (5, 6, 12)):
        example = inputs(*shape)
        torch.testing.assert_close(program.module()(*example), model(*example), rtol=1e-4, atol=1e-5)


def test_weights_come_back_as_saved(tmp_path):
    model = DigitsDiT()
    save_weights(model, tmp_path / "weights.safetensors", {})
    loaded = load_digits_dit(tmp_path / "weights.safetensors").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def _edit(change):
    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _pickle(path: Path) -> None:
    torch.save(DigitsDiT().state_dict(), path)


NAME = "blocks.3.attn.qkv.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "no weights"),
        (_truncate, "cannot be read"),
        (_pickle, "cannot be read"),
        (_edit(lambda tensors: tensors.pop(NAME)), f"1 missing, {NAME}"),
        (_edit(lambda tensors: tensors.update(extra=torch.zeros(1))), "1 more, extra"),
        (_edit(lambda tensors: tensors.update({NAME: torch.zeros(384, 64)})), r"\[384, 64\]"),
        (_edit(lambda tensors: tensors.update({NAME: tensors[NAME].half()})), "float16"),
        (_edit(lambda tensors: tensors[NAME][5, 5:7].fill_(torch.nan)), "2 of 49152 are NaN"),
        (_edit(lambda tensors: tensors[NAME][0, 0].fill_(-torch.inf)), "1 of 49152 are NaN or Inf"),
    ],
)
def test_unfit_weights_are_refused(tmp_path, damage, message):
    path = tmp_path / "weights.safetensors"
    save_weights(DigitsDiT(), path, {})
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        load_digits_dit(path)
    assert caught.value.expected and caught.value.got and caught.value.remedy
