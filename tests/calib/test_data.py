"""Calibration data: every source streams its samples, and every bad input is refused by name or skipped."""

import json
import sys
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from calibration_data import inputs_of, write_images, write_inputs
from PIL import Image
from safetensors.torch import save_file

from trtconvert.calib.data import BadSamples, open_data
from trtconvert.calib.recorded_inputs import open_inputs
from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.images import read_image
from trtconvert.models.digits_dit import NULL_LABEL
from trtconvert.recipe import CalibrationSection


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


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({3: torch.zeros(1)}, "a tensor under 3"),
        ({"x": torch.zeros(9, 1, 8, 8, device="meta")}, "on the meta device"),
        ({"x": torch.quantize_per_tensor(torch.zeros(9, 1, 8, 8), 0.1, 0, torch.qint8)}, "quantised"),
        ({"x": torch.zeros(9, 1, 8, 8).to_sparse()}, "layout torch.sparse_coo"),
        ({"x": torch.zeros(9, 1, 8, 8, dtype=torch.complex64)}, "torch.complex64"),
        ({"x": torch.zeros(9, 1, 8, 8, dtype=torch.float8_e4m3fn)}, "torch.float8_e4m3fn"),
    ],
    ids=["number", "meta", "quantised", "sparse", "complex", "float8"],
)
def test_tensors_that_are_no_plain_numbers_are_refused(digits, inputs, tmp_path, change, got):
    torch.save(inputs | change, tmp_path / "a.pt")
    with pytest.raises(UserError, match="cannot read the calibration data") as refused:
        inputs_of(digits, tmp_path / "a.pt")
    assert got in refused.value.got


def test_a_safetensors_file_of_odd_types_or_with_a_name_twice_is_refused(digits, inputs, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(inputs | {"x": inputs["x"].to(torch.float8_e4m3fn), "other": inputs["x"].to(torch.float8_e5m2)}, path)
    with pytest.raises(UserError, match="x has the type F8_E4M3"):
        inputs_of(digits, path)
    save_file(inputs | {"other": inputs["x"].to(torch.float8_e5m2)}, path)
    inputs_of(digits, path)  # arrays that the model does not take may have any type
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    twice = header.replace(b'"other"', b'"x"')
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + len(header) :])
    with pytest.raises(UserError, match="the key 'x' twice"):
        inputs_of(digits, path)


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.pt"])
def test_a_device_is_no_file_of_inputs(digits, tmp_path, name):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a device, not a file"):
        open_inputs(digits, tmp_path / name)


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
    """Unpickling writes a file."""

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


def test_images_are_shown_at_stratified_timesteps(digits, tmp_path):
    images = write_images(tmp_path / "images")
    (tmp_path / "images" / "note.md").write_text("not an image")
    seen, _ = inputs_of(digits, tmp_path / "images")
    assert [len(call["x"]) for call in seen] == [4] * 5 + [2] * 5
    for number, call in enumerate(seen):
        stratum = number % 5
        assert ((call["timestep"] >= stratum * 200) & (call["timestep"] < (stratum + 1) * 200)).all()
        assert (call["label"] == NULL_LABEL).all()
    # The least noisy call holds the images plus little noise.
    least = seen[0]
    sigma = digits.sigmas[least["timestep"].long()].float()[:, None, None, None]
    noise = least["x"] * (1 + sigma**2).sqrt() - (images[:4] * 2 - 1)
    assert noise.std().item() == pytest.approx(sigma.square().mean().sqrt().item(), rel=0.2)
    again, _ = inputs_of(digits, tmp_path / "images")
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(seen, again, strict=True))


def test_images_are_never_shown_beyond_the_schedule(digits, tmp_path, monkeypatch):
    """Draws the largest FP32 number below 1. FP32 rounds a sum with this number up."""
    write_images(tmp_path / "images")
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, 1 - 2.0**-24))
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
        (lambda f: (f / "01.txt").write_bytes(b"\xff"), "has no caption", "no readable caption"),
        (lambda f: (f / "01.txt").unlink(), "has no caption", "no readable caption"),
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
    """The start of a PNG with this size in its header."""
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
    """Yields batches of different sizes."""
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


def without_data(model):
    yield model.example(1, {"batch": 1, "height": 8, "width": 8}) | {"x": torch.zeros(1, 1, 8, 8, device="meta")}


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
        ("three_batches", 15, "too few samples\n.*\n  got: 14\n  remedy: set calibration.samples .* to 14, or"),
        ("no_label", 6, "does not give the denoiser's inputs"),
        ("wrong_shape", 6, "'timestep' from test_data:wrong_shape has the wrong shape\n  expected: .*, batch 4\n"),
        ("fails", 6, "test_data:fails failed"),
        ("words", 1, "'x' from test_data:words is no tensor"),
        ("without_data", 1, "no tensor of numbers\n.*\n  got: .* on the meta device, without data"),
        ("beyond", 4, "'timestep' from test_data:beyond leaves the noise schedule"),
        ("missing", 6, "'test_data:missing' cannot be imported"),
    ],
)
def test_an_unfit_function_is_refused(digits, function, samples, message):
    with pytest.raises(UserError, match=message):
        inputs_of(digits, f"test_data:{function}", samples=samples)
