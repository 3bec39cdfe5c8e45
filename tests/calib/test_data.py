"""Calibration data: every source streams what it holds, and every bad input is refused by name or left out and listed."""

import json
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import REPOSITORY, Quiet, environment, finish, refusal, run, start, tiny_recipe

from trtconvert.calib.calibrate import calibrate, sites_to_convert
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.data import BadSamples, open_data
from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.images import read_image
from trtconvert.models.digits_dit import NULL_LABEL
from trtconvert.recipe import AttentionSection, CalibrationSection, load_recipe

RECIPE = REPOSITORY / "recipes" / "digits-dit.yaml"


def inputs_of(model, data, skip=False, **fields):
    """What the denoiser is given, call by call, and what was left out."""
    seen, bad = [], BadSamples(skip)
    fields = {"samples": 6, "batch": 4, "steps": 5} | fields
    opened = open_data(model, CalibrationSection(data=data, **fields), bad)

    def denoiser(x, timestep, **conditions):
        seen.append({"x": x, "timestep": timestep} | conditions)
        return torch.zeros_like(x)

    batches = list(opened.batches)
    assert opened.count in (None, len(batches))
    for batch in batches:
        batch(denoiser)
    return seen, bad.take()


def write_images(folder, count=6, size=(8, 8)):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0]), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    return torch.from_numpy(pixels[:, None] / np.float32(255))


def write_inputs(path, inputs):
    arrays = {name: x.numpy() for name, x in inputs.items()}
    match path.suffix:
        case ".npz" if "small" in path.name:
            np.savez_compressed(path, **arrays)
        case ".npz":
            np.savez(path, **arrays)
        case ".pt":
            torch.save(inputs, path)
        case _:
            save_file(inputs, path)
    return path


@pytest.fixture
def inputs(digits):
    return digits.example(5, {"batch": 7, "height": 8, "width": 8})


# Recorded inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npz", "small.npz", "a.safetensors", "a.pt"])
def test_recorded_inputs_come_in_order(digits, inputs, tmp_path, name):
    seen, _ = inputs_of(digits, write_inputs(tmp_path / name, inputs | {"prev_x": inputs["x"] + 1}))
    assert [len(call["x"]) for call in seen] == [4, 2]
    for key, expected in inputs.items():
        assert torch.equal(torch.cat([call[key] for call in seen]), expected[:6])


@pytest.mark.parametrize("name", ["a.npz", "small.npz"])
def test_arrays_are_never_all_in_memory(digits, tmp_path, name):
    count = 20_000
    inputs = digits.example(0, {"batch": count, "height": 16, "width": 16})
    path = write_inputs(tmp_path / name, inputs)
    tracemalloc.start()
    seen, _ = inputs_of(digits, path, samples=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(seen[1]["x"], inputs["x"][4:8])
    assert peak < inputs["x"].nbytes / 4


def test_a_batch_with_nan_is_refused_or_left_out(digits, inputs, tmp_path):
    inputs["x"][1, 0, 2, 3] = torch.nan
    inputs["timestep"][5] = 1000.0
    path = write_inputs(tmp_path / "a.safetensors", inputs)
    with pytest.raises(UserError, match=r"'x' in .*a\.safetensors is damaged at sample 1"):
        inputs_of(digits, path)
    seen, skipped = inputs_of(digits, path, skip=True)
    assert torch.equal(torch.cat([call["x"] for call in seen]), inputs["x"][[0, 2, 3, 4]])
    assert len(skipped) == 2 and "sample 1: 1 of 64 are NaN or Inf" in skipped[0] and "sample 5: 1000" in skipped[1]


@pytest.mark.parametrize("name", ["a.npz", "small.npz", "a.safetensors", "a.pt"])
def test_whole_timesteps_are_held_to_the_schedule_too(digits, inputs, tmp_path, name):
    inputs["timestep"] = torch.tensor([0, 999, 1000, -1, 5, 6, 7])
    seen, skipped = inputs_of(digits, write_inputs(tmp_path / name, inputs), skip=True)
    assert torch.cat([call["timestep"] for call in seen]).tolist() == [0, 999, 5, 6]
    assert [left.split(" at ")[1] for left in skipped] == ["sample 2: 1000", "sample 3: -1"]


def test_a_number_that_fp32_does_not_hold_is_damage(digits, inputs, tmp_path):
    inputs["x"] = inputs["x"].double()
    inputs["x"][1, 0, 2, 3] = 1e300
    with pytest.raises(UserError, match="is damaged at sample 1"):
        inputs_of(digits, write_inputs(tmp_path / "a.npz", inputs))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_that_the_model_does_not_take_may_be_of_any_type(digits, inputs, tmp_path, save):
    others = {"captions": np.array(["a", "b"]), "when": np.array("2026-01-01", "M8[D]"), "more": np.array([None])}
    save(tmp_path / "a.npz", **{name: x.numpy() for name, x in inputs.items()}, **others)
    seen, _ = inputs_of(digits, tmp_path / "a.npz")
    assert torch.equal(torch.cat([call["x"] for call in seen]), inputs["x"][:6])


@pytest.mark.parametrize("dtype", [">f4", "g", "U3"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_types_that_torch_has_not_are_refused(digits, inputs, tmp_path, save, dtype):
    arrays = {name: x.numpy() for name, x in inputs.items()}
    save(tmp_path / "a.npz", **arrays | {"x": arrays["x"].astype(dtype)})
    with pytest.raises(UserError, match="cannot read the calibration data"):
        inputs_of(digits, tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["small.npz", "a.pt"])
def test_damaged_files_are_refused_wherever_the_damage_is(digits, inputs, tmp_path, name):
    path = write_inputs(tmp_path / name, inputs)
    whole, refusals = path.read_bytes(), 0
    for place in range(0, len(whole), len(whole) // 100):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            inputs_of(digits, path)
        except UserError:
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize("name", ["a.npz", "small.npz", "a.safetensors", "a.pt"])
def test_a_number_for_all_samples_is_an_input(tmp_path, name):
    given = []
    tiny = tiny_models.build()
    guided = replace(tiny, inputs=(*tiny.inputs, InputSpec("guidance", "float32", ())))
    arrays = {"x": torch.zeros(3, 1, 4, 4), "timestep": torch.arange(3.0), "guidance": torch.tensor(3.5)}
    section = CalibrationSection(data=write_inputs(tmp_path / name, arrays), samples=3, batch=2)
    for batch in open_data(guided, section, BadSamples()).batches:
        batch(lambda **inputs: given.append(inputs["guidance"]))
    assert given == [torch.tensor(3.5)] * 2


class Trap:
    """Unpickling it would leave a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_pickled_code_is_not_executed(digits, tmp_path):
    torch.save({"x": Trap(tmp_path / "mark")}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", x=np.array([Trap(tmp_path / "mark")], dtype=object))
    for name in ("a.pt", "a.npz"):
        with pytest.raises(UserError, match="cannot read the calibration data"):
            inputs_of(digits, tmp_path / name)
    assert not (tmp_path / "mark").exists()


# Images, captions, prompts --------------------------------------------------------------------------------------------


def test_images_are_shown_at_stratified_timesteps(digits, tmp_path):
    images = write_images(tmp_path / "images")
    (tmp_path / "images" / "note.md").write_text("not an image")
    seen, _ = inputs_of(digits, tmp_path / "images")
    assert [len(call["x"]) for call in seen] == [4] * 5 + [2] * 5
    for number, call in enumerate(seen):
        stratum = number % 5
        assert ((call["timestep"] >= stratum * 200) & (call["timestep"] < (stratum + 1) * 200)).all()
        assert (call["label"] == NULL_LABEL).all()
    # The least noisy call shows the images themselves, but for its noise.
    least = seen[0]
    sigma = digits.sigmas[least["timestep"].long()].float()[:, None, None, None]
    noise = least["x"] * (1 + sigma**2).sqrt() - (images[:4] * 2 - 1)
    assert noise.std().item() == pytest.approx(sigma.square().mean().sqrt().item(), rel=0.2)
    again, _ = inputs_of(digits, tmp_path / "images")
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(seen, again, strict=True))


def test_images_are_never_shown_beyond_the_schedule(digits, tmp_path, monkeypatch):
    """The largest number that torch draws below 1, after which FP32 rounds a sum up."""
    write_images(tmp_path / "images")
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None: torch.full(shape, 1 - 2.0**-24))
    seen, _ = inputs_of(digits, tmp_path / "images", steps=20)
    assert max(call["timestep"].max() for call in seen) == 999


def test_noise_preserves_variance(digits):
    timestep = torch.tensor([0, 500, 999])
    one, none = torch.ones(3, 1, 1, 1), torch.zeros(3, 1, 1, 1)
    signal, noise = digits.noised(one, none, timestep), digits.noised(none, one, timestep)
    torch.testing.assert_close(signal**2 + noise**2, one)
    torch.testing.assert_close((noise / signal).flatten(), digits.sigmas[timestep].float())


@pytest.mark.parametrize("source", ["metadata", "text files"])
def test_captions_become_conditions(digits, tmp_path, source):
    write_images(tmp_path)
    captions = ["3", "1", "4", "1", "5", "9"]
    if source == "metadata":
        lines = [json.dumps({"file_name": f"{i:02d}.png", "text": c}) for i, c in enumerate(captions)]
        (tmp_path / "metadata.jsonl").write_text("\n".join(reversed(lines)))
    else:
        for number, caption in enumerate(captions):
            (tmp_path / f"{number:02d}.txt").write_text(f"{caption}\n")
    seen, _ = inputs_of(digits, tmp_path, steps=1)
    assert torch.cat([call["label"] for call in seen]).tolist() == [3, 1, 4, 1, 5, 9]


def test_prompts_are_denoised(digits, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbf7\n\n8\r\n9\n0\n1\n2")
    seen, _ = inputs_of(digits, path)
    assert len(seen) == 10
    assert seen[0]["label"].tolist() == [7, 8, 9, 0] and seen[9]["label"].tolist() == [1, 2]
    assert seen[0]["timestep"].unique().tolist() == [999.0]


@pytest.mark.parametrize(
    ("spoil", "problem", "got"),
    [
        (lambda f: (f / "01.png").write_bytes(b"no image"), "cannot read the image", "cannot identify"),
        (lambda f: (f / "01.png").write_bytes((f / "01.png").read_bytes()[:60]), "cannot read the image", ""),
        (lambda f: Image.new("L", (9, 8)).save(f / "01.png"), "has the wrong size", "9 × 8"),
        (lambda f: (f / "01.txt").write_bytes(b"\xff"), "has no caption", "none that can be read"),
        (lambda f: (f / "01.txt").unlink(), "has no caption", "none that can be read"),
        (lambda f: (f / "01.txt").write_text("cat"), "cannot take the caption", "'cat'"),
    ],
)
def test_a_bad_image_is_named_or_left_out(digits, tmp_path, spoil, problem, got):
    write_images(tmp_path)
    for number in range(6):
        (tmp_path / f"{number:02d}.txt").write_text(str(number))
    spoil(tmp_path)
    with pytest.raises(UserError) as refused:
        inputs_of(digits, tmp_path)
    assert problem in refused.value.problem and "01.png" in refused.value.problem and got in refused.value.got
    assert refused.value.remedy
    seen, skipped = inputs_of(digits, tmp_path, skip=True, steps=1)
    assert torch.cat([call["label"] for call in seen]).tolist() == [0, 2, 3, 4, 5]
    assert len(skipped) == 1 and problem in skipped[0]


def test_lines_of_nothing_but_space_are_no_prompts(digits, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff\r\n\u00a0\n3\n \t\n".encode())
    seen, _ = inputs_of(digits, path, samples=1)
    assert all(call["label"].tolist() == [3] for call in seen)
    path.write_bytes("\ufeff\r\n".encode())
    with pytest.raises(UserError, match="there is no prompt"):
        inputs_of(digits, path, samples=1)


def test_a_prompt_in_another_encoding_is_named_by_its_line(digits, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"1\n2\n\xe9t\xe9\n3\n4\n5\n")
    with pytest.raises(UserError, match=r"prompts\.txt:3 is not UTF-8"):
        inputs_of(digits, path)
    seen, skipped = inputs_of(digits, path, skip=True)
    assert seen[0]["label"].tolist() == [1, 2, 3]
    assert skipped == [f"{path}:3 is not UTF-8: byte 0xe9 at column 1"]


def png_header(width, height):
    """The start of a PNG that claims to be this large."""
    chunk = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + b"\x08\x00\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)


def test_grey_of_16_bits_keeps_its_greys(tmp_path):
    levels = np.array([[0, 0x4000], [0x8000, 0xFFFF]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    read = read_image(lambda: Image.open(tmp_path / "grey.png"), "grey.png", (1, 2, 2), "")
    assert (read.flatten() * 255).tolist() == [0, 0x40, 0x80, 0xFF]
    Image.fromarray(levels.astype(np.float32)).save(tmp_path / "grey.tiff")
    with pytest.raises(UserError, match="cannot read the image"):
        read_image(lambda: Image.open(tmp_path / "grey.tiff"), "grey.tiff", (1, 2, 2), "")


def test_examples_stay_within_the_schedule(digits, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, 1 - 2.0**-24))
    timestep = digits.example(0, {"batch": 4, "height": 8, "width": 8})["timestep"]
    assert timestep.max() == digits.timestep_max - 1


def test_an_image_that_claims_to_be_huge_is_not_decoded(digits, tmp_path):
    write_images(tmp_path)
    (tmp_path / "00.png").write_bytes(png_header(60_000, 60_000))
    with pytest.raises(UserError, match="cannot read the image"):
        inputs_of(digits, tmp_path)


# Datasets and functions -----------------------------------------------------------------------------------------------


def test_a_dataset_on_disk(digits, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the optional library datasets is not installed")
    images = write_images(tmp_path / "images")
    columns = {"image": [str(p) for p in sorted((tmp_path / "images").iterdir())], "label": list(range(6))}
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "data")
    seen, _ = inputs_of(digits, tmp_path / "data")
    expected, _ = inputs_of(digits, tmp_path / "images")
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(seen, expected, strict=True))
    assert seen[0]["label"].tolist() == [0, 1, 2, 3] and len(images) == 6


def test_a_missing_library_is_named(digits, tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as refused:
        inputs_of(digits, tmp_path)
    assert "pip install datasets" in refused.value.remedy


def three_batches(model):
    """Yields batches of its own sizes."""
    for size in (4, 1, 9):
        yield model.example(size, {"batch": size, "height": 8, "width": 8})


def no_label(model):
    for inputs in three_batches(model):
        yield {"x": inputs["x"], "timestep": inputs["timestep"]}


def wrong_shape(model):
    for inputs in three_batches(model):
        yield inputs | {"timestep": inputs["timestep"][:1]} if len(inputs["x"]) > 1 else inputs


def fails(model):
    raise RuntimeError("no such dataset")


def words(model):
    yield {"x": "abc", "timestep": [1.0], "label": [0]}


def beyond(model):
    yield next(three_batches(model)) | {"timestep": torch.tensor([0.0, 999.0, 1000.0, 5.0])}


def test_a_function_yields_batches(digits):
    seen, _ = inputs_of(digits, "test_data:three_batches")
    assert [len(call["x"]) for call in seen] == [4, 1, 1]
    for call, expected in zip(seen, three_batches(digits), strict=True):
        assert torch.equal(call["x"], expected["x"][: len(call["x"])])


@pytest.mark.parametrize(
    ("function", "samples", "message"),
    [
        ("three_batches", 15, "too few samples"),
        ("no_label", 6, "does not give the denoiser's inputs"),
        ("wrong_shape", 6, "'timestep' from test_data:wrong_shape has the wrong shape"),
        ("fails", 6, "test_data:fails failed"),
        ("words", 1, "'x' from test_data:words is no tensor"),
        ("beyond", 4, "'timestep' from test_data:beyond leaves the noise schedule"),
        ("missing", 6, "'test_data:missing' cannot be imported"),
    ],
)
def test_an_unfit_function_is_refused(digits, function, samples, message):
    with pytest.raises(UserError, match=message):
        inputs_of(digits, f"test_data:{function}", samples=samples)


# The commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("label", lambda x: x + 20, ["digits-dit cannot take samples 0 to 3 of", "IndexError"]),
        ("label", lambda x: x + 0.5, ["'label' in", "damaged at sample 0", "expected: whole numbers", "got: 0.5"]),
        ("x", lambda x: torch.zeros(4, 1, 8, 17), ["'x' in", "width 4 to 16", "got: [4, 1, 8, 17]"]),
        ("x", lambda x: torch.zeros(4, 3, 8, 8), ["'x' in", "got: [4, 3, 8, 8]"]),
        ("timestep", lambda x: x[:3], ["'timestep' in", "too few samples", "got: 3"]),
    ],
)
def test_mismatched_recordings_are_refused(digits, tmp_path, name, change, parts):
    inputs = digits.example(5, {"batch": 4, "height": 8, "width": 8})
    inputs["label"] = torch.arange(4)
    path = write_inputs(tmp_path / "a.safetensors", inputs | {name: change(inputs[name])})
    arguments = ("--data", path, "-n", 4, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache")
    refusal(run("calibrate", RECIPE, *arguments), "a.safetensors", *parts)


def test_nothing_but_bad_samples_is_nothing_to_calibrate_on(tmp_path):
    write_images(tmp_path / "images", count=3, size=(9, 9))
    arguments = (
        "--data",
        tmp_path / "images",
        "-n",
        3,
        "-o",
        tmp_path / "c.safetensors",
        "--cache",
        tmp_path / "cache",
    )
    refusal(
        run("calibrate", RECIPE, *arguments, "--skip-bad"),
        "there is nothing to calibrate on",
        "3 bad samples",
        "00.png",
    )


def test_unfit_data_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.md").write_text("x")
    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "few.txt").write_text("1\n")
    (tmp_path / "data.csv").write_text("1\n")
    (tmp_path / "lines").mkdir()
    write_images(tmp_path / "lines")
    (tmp_path / "lines" / "metadata.jsonl").write_text('{"file_name": "00.png"}\n')
    for data, *parts in [
        ("empty", "there is no image in", "an empty folder"),
        ("others", "there is no image in", "other files"),
        ("none.txt", "there is no prompt in"),
        ("few.txt", "too few samples", "got: 1", "--samples"),
        ("data.csv", "cannot read the calibration data", "'.csv'"),
        ("lines", "metadata.jsonl:1 does not describe an image"),
        ("absent.pt", "No such file or folder"),
    ]:
        arguments = (
            "--data",
            tmp_path / data,
            "-n",
            2,
            "-o",
            tmp_path / "c.safetensors",
            "--cache",
            tmp_path / "cache",
        )
        refusal(run("calibrate", RECIPE, *arguments), *parts)
    assert not (tmp_path / "c.safetensors").exists()


def test_a_model_without_encoder_or_condition_says_so(tmp_path):
    write_images(tmp_path / "images", size=(4, 4))
    (tmp_path / "prompts.txt").write_text("1\n2\n")
    recipe = tiny_recipe(tmp_path)
    for data, part in (("images", "cannot take the image"), ("prompts.txt", "cannot take captions")):
        refusal(run("calibrate", recipe, "--data", tmp_path / data, "--cache", tmp_path / "cache"), part)


def test_what_was_left_out_is_counted_and_listed(tmp_path):
    write_images(tmp_path / "images", count=8)
    (tmp_path / "images" / "03.png").write_bytes(b"no image")
    output = tmp_path / "c.safetensors"
    arguments = ("--data", tmp_path / "images", "-n", 8, "-o", output, "--cache", tmp_path / "cache")
    outcome = run("calibrate", RECIPE, *arguments, "--skip-bad")
    assert outcome.exit_code == 0, outcome.output
    assert "1 bad samples left out:" in outcome.output and "03.png" in outcome.output
    made = Calibration.load(output)
    assert len(made.provenance.skipped) == 1
    # The default statistic counts what it clips too.
    assert made.outliers.keys() == made.tables.keys() and "clipped elements: at most" in outcome.output


def test_a_build_leaves_bad_samples_out_only_when_it_is_asked_to(tmp_path, digits):
    inputs = digits.example(5, {"batch": 6, "height": 8, "width": 8})
    inputs["x"][2, 0, 0, 0] = torch.nan
    write_inputs(tmp_path / "inputs.safetensors", inputs)
    sections = {
        "model": {"source": "digits-dit", "weights": str(RECIPE.with_suffix(".safetensors"))},
        "attention": {"modes": "balanced"},
        "calibration": {"data": "inputs.safetensors", "samples": 6, "bins": 2},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 1, "steps": 2, "min_psnr": 10, "min_site_sqnr": 5},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
    arguments = ("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(run(*arguments), "is damaged at sample 2", "--skip-bad")
    outcome = run(*arguments, "--skip-bad")
    assert outcome.exit_code == 0, outcome.output
    assert len(Calibration.load(tmp_path / "bundle" / "calibration.safetensors").provenance.skipped) == 1
    for told in (outcome.output, run("inspect", tmp_path / "bundle").output):
        assert "1 bad samples left out" in " ".join(told.replace("│", " ").split())
    # What was left out is not in the cache of a build that leaves nothing out.
    refusal(run(*arguments), "is damaged at sample 2")


def test_what_an_interrupted_run_left_out_is_no_secret_of_the_next(tmp_path, digits, inputs):
    """A run with --skip-bad was stopped before its end; one without goes on from its batches."""
    inputs["x"][1, 0, 0, 0] = torch.nan
    section = CalibrationSection(data=write_inputs(tmp_path / "a.safetensors", inputs), samples=6, batch=2, bins=2)
    sites, _ = sites_to_convert(digits, AttentionSection())

    def made(**options):
        return calibrate(digits, section, "weights", sites, tmp_path / "work", Quiet(), **options)

    assert len(made(skip_bad=True).provenance.skipped) == 1
    with pytest.raises(UserError, match="is damaged at sample 1"):
        made()
    assert len(made(skip_bad=True).provenance.skipped) == 1


def test_a_recipe_takes_a_calibration(tmp_path):
    recipe, output = tiny_recipe(tmp_path), tmp_path / "c.safetensors"
    assert run("calibrate", recipe, "-o", output, "--cache", tmp_path / "cache").exit_code == 0
    made = Calibration.load(output)

    def building(**sections):
        (tmp_path / "taking").mkdir(exist_ok=True)
        taking = tiny_recipe(tmp_path / "taking", **sections)
        document = json.loads(taking.read_text())
        document["calibration"] = {"from": "../c.safetensors", "bins": 2} | sections.get("calibration", {})
        taking.write_text(json.dumps(document))
        return run("build", taking, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")

    assert building().exit_code == 0
    bundled = Calibration.load(tmp_path / "bundle" / "calibration.safetensors")
    assert bundled.provenance == made.provenance
    for name, table in made.tables["denoiser"].items():
        assert torch.equal(bundled.tables["denoiser"][name], table)
    assert run("inspect", tmp_path / "bundle").exit_code == 0  # the manifest's recipe reads back

    refusal(building(model={"source": "tiny_models:another_build"}), "was calibrated for another model", "hash")
    refusal(building(calibration={"bins": 3}, attention={"modes": "fp16"}), "has other timestep bins")
    message = building(calibration={"samples": 3}).output
    assert "'from' takes a calibration as it is: remove samples" in message
    output.write_bytes(output.read_bytes()[:-8])
    refusal(building(), "is not a calibration")
    output.unlink()
    refusal(building(), "is not a calibration", "no file")


def test_recorded_inputs_serve_as_calibration_data(tmp_path):
    recipe, output = tiny_recipe(tmp_path, calibration={"samples": 6, "steps": 9}), tmp_path / "inputs.safetensors"
    outcome = run("record", recipe, "-o", output, "--per-run", 4)
    assert outcome.exit_code == 0, outcome.output
    assert "24 inputs of tiny" in outcome.output
    inputs = load_file(output)
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "x": [24, 1, 4, 4], "timestep": [24], "prev_x": [24, 1, 4, 4], "prev_timestep": [24],
    }  # fmt: skip
    # Every run gives one step of each quarter, and the step before it is one step noisier.
    spacing = 1000 / 9
    assert ((inputs["prev_timestep"] - inputs["timestep"]) - spacing).abs().max() <= 1
    steps = ((999 - inputs["timestep"]) / spacing).round().view(6, 4)
    assert (((steps - 1) / 8 * 4).floor() == torch.arange(4)).all()
    replayed = run(
        "calibrate", recipe, "--data", output, "-n", 24, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache"
    )
    assert replayed.exit_code == 0, replayed.output


def test_a_recorded_step_is_the_sampler_s_own(digits, tmp_path):
    from trtconvert.calib.record import record

    section = CalibrationSection(samples=3, batch=2, steps=4)
    record(digits, section, 3, "weights", tmp_path / "i.safetensors", Quiet())
    inputs = load_file(tmp_path / "i.safetensors")
    calls = []

    def denoiser(x, timestep, **conditions):
        calls.append((x, timestep, conditions["label"]))
        return digits.denoiser(x, timestep, **conditions)

    digits.sample(denoiser, [2], steps=4, solver="ddim")
    # Of sample 2, the three steps after the first, in order.
    for row, (before, after) in enumerate(zip(calls, calls[1:], strict=False), start=6):
        torch.testing.assert_close(inputs["x"][row], after[0][0])
        torch.testing.assert_close(inputs["prev_x"][row], before[0][0])
        assert inputs["timestep"][row] == after[1] and inputs["label"][row] == 2


def test_every_row_of_a_recording_is_written(tmp_path, monkeypatch):
    """Also with the largest number that torch draws below 1, and from a sampler whose timesteps are FP64."""
    from trtconvert.calib.record import record

    tiny = tiny_models.build()

    def sample(denoiser, seeds, **options):
        return tiny.sample(lambda x, t: denoiser(x, t.double()).float(), seeds, **options)

    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None: torch.full(shape, 1 - 2.0**-24))
    section = CalibrationSection(samples=2, batch=2, steps=5)
    record(replace(tiny, sample=sample), section, 4, "weights", tmp_path / "i.safetensors", Quiet())
    inputs = load_file(tmp_path / "i.safetensors")
    assert inputs["x"].flatten(1).any(1).all()
    assert (inputs["prev_timestep"] > inputs["timestep"]).all()


def test_unfit_recordings_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_images(tmp_path / "images")
    refusal(run("record", recipe, "-o", tmp_path / "a.npz"), "inputs are not written as 'a.npz'")
    refusal(run("record", recipe, "-o", tmp_path / "a.safetensors", "--per-run", 4), "1 to 3", "--per-run")
    images = ("--data", tmp_path / "images")
    refusal(run("record", recipe, "-o", tmp_path / "a.safetensors", *images), "there are no denoising runs")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_full_disk_keeps_what_was_finished(tmp_path):
    recipe = tiny_recipe(tmp_path, calibration={"samples": 8, "statistic": "elements"})
    # Rows of a batch are small, counts of elements are not: a limit on the size of files stands for a full disk.
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; trap "" XFSZ; exec "$0" -m trtconvert.cli "$@"', sys.executable, "calibrate",
         str(recipe), "-o", str(tmp_path / "c.safetensors"), "--cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert limited.returncode == 2, limited.stderr
    for part in ("the disk is full", "remedy: ", "4 batches finished and kept in"):
        assert part in limited.stderr
    outcome = finish(start("calibrate", recipe, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache"))
    assert outcome.exit_code == 0


def test_two_calibrations_of_the_same_take_turns(tmp_path):
    recipe = tiny_recipe(tmp_path, calibration={"samples": 24, "batch": 1, "steps": 20})
    outputs = [tmp_path / f"{number}.safetensors" for number in range(3)]
    running = [start("calibrate", recipe, "-o", output, "--cache", tmp_path / "cache") for output in outputs]
    for outcome in map(finish, running):
        assert outcome.exit_code == 0, outcome.output
    # Each has seen all of the data, not what another one had left.
    assert len({output.read_bytes() for output in outputs}) == 1
    assert sum(Calibration.load(outputs[0]).provenance.observed) == 24 * 20
    assert not list((tmp_path / "cache").iterdir())


def test_options_of_the_command_line_replace_the_recipe_s(tmp_path):
    from trtconvert.cli import _with_data

    recipe = load_recipe(RECIPE)
    changed = _with_data(RECIPE, "package.module:function", 5).calibration
    assert (changed.data, changed.samples, changed.steps) == ("package.module:function", 5, recipe.calibration.steps)
