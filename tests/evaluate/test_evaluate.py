"""`trtconvert evaluate`: results, kills, ranks and refusals."""

import io
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image
from rich.console import Console
from support import WEIGHTS, environment, finish, partials, refusal, run, start, torchrun
from tolerances import EIGENVALUES, WHOLE_DENOISER

from trtconvert import models, runtime
from trtconvert.attention.sites import attention_hooks
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.distributed import ALONE
from trtconvert.errors import UserError
from trtconvert.evaluate import evaluation, metrics, shards, torch_int8
from trtconvert.evaluate.drawing import Drawing, Pairs
from trtconvert.evaluate.features import load_extractor
from trtconvert.evaluate.records import Evaluation, Request, SetQuality, read_evaluation
from trtconvert.evaluate.reference_set import load_reference
from trtconvert.evaluate.shards import ShardSet
from trtconvert.evaluate.table import Row, rows, watch_line
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.files import PARTIAL
from trtconvert.models.denoiser import DenoiserInType
from trtconvert.models.placed import Place
from trtconvert.models.recorded_calls import relative_error
from trtconvert.progress import Reporter

TINY_SHAPE = torch.Size([1, 4, 4])
SAMPLES = 2 * evaluation.SHARD + 10
CODE = ["trtconvert.evaluate.evaluation"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """40 images of the tiny model's size, in two folders."""
    folder = tmp_path_factory.mktemp("reference")
    pixels = torch.randint(0, 256, (40, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for index, image in enumerate(pixels):
        path = folder / str(index % 2) / f"{index:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image.numpy()).save(path)
    return folder


@pytest.fixture
def tiny(tiny_build, reference):
    """Arguments for a fast evaluation of the tiny model, with three shards per set."""
    return [
        "evaluate", tiny_build.bundle, "--reference", reference, "--features", "tiny_features:pixels",
        "--samples", SAMPLES, "--steps", 2,
    ]  # fmt: skip


def outcome_of(path):
    """An evaluation without its time."""
    return read_evaluation(path).model_copy(update={"created": ""})


def digits_arguments(build, folder, *more):
    return [
        "evaluate",
        build.bundle,
        "-n",
        20,
        "--steps",
        2,
        "--work",
        folder / "work",
        "-o",
        folder / "out.json",
        *more,
    ]


def reporter():
    from rich.console import Console

    return Reporter(Console(quiet=True))


# What it finds


def test_the_digits_are_compared_with_full_precision_and_with_held_out_ones(digits_build, tmp_path):
    outcome = run(*digits_arguments(digits_build, tmp_path, "--weights", WEIGHTS))
    assert outcome.exit_code == 0, outcome.output
    found = read_evaluation(tmp_path / "out.json")
    assert found.reference_count == 360 and found.samples == 20
    assert found.paired is not None and 30 < found.paired.psnr < 120
    assert found.paired.psnr_worst <= found.paired.psnr and 0.9 < found.paired.ssim <= 1
    assert found.full is not None and found.other is not None
    # INT8 is far nearer to full precision than other seeds are.
    assert abs(found.int8.fid - found.full.fid) < abs(found.full.fid - found.other.fid)
    assert all(value is not None for value in found.int8.model_dump().values())
    assert found.int8.nonfinite == 0 and set(found.paired.nonfinite_sites.values()) == {0}
    for shown in ("FID", "sFID", "KID", "IS", "precision", "recall", "accuracy", "PSNR", "SSIM", "NaN or Inf"):
        assert shown in outcome.output


def test_lpips_is_found_when_its_weights_are_given(digits_build, tmp_path, alexnet):
    outcome = run(*digits_arguments(digits_build, tmp_path, "--weights", WEIGHTS, "--lpips-weights", alexnet))
    assert outcome.exit_code == 0, outcome.output
    found = read_evaluation(tmp_path / "out.json").paired
    assert 0 < found.lpips <= found.lpips_worst < 1 and "LPIPS" in outcome.output


@pytest.mark.soak
def test_full_precision_computes_in_the_type_that_was_asked_for(digits_build, tmp_path):
    """16-bit full precision changes the comparison, but not the INT8 samples."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        outcome = run(*digits_arguments(digits_build, tmp_path, "--weights", WEIGHTS, "--dtype", dtype))
        assert outcome.exit_code == 0, outcome.output
        found[dtype] = read_evaluation(tmp_path / "out.json")
        assert found[dtype].dtype == dtype and dtype in outcome.output
    exact, rounded = found.values()
    assert exact.int8 == rounded.int8 and exact.full != rounded.full and exact.other != rounded.other
    assert rounded.paired.psnr < exact.paired.psnr - 3  # BF16 is coarser than these scales


def test_a_denoiser_in_another_type_is_a_copy_that_gets_timesteps_whole(digits):
    seen = []

    def handler(call):
        seen.append((call.q.dtype, call.timestep))
        return call.exact()

    inputs = digits.example(3, {"batch": 2, "height": 8, "width": 8}) | {"timestep": torch.tensor([999.0, 1.0])}
    rounded = DenoiserInType(digits, torch.bfloat16, attention_hooks(handler))(**inputs)
    with torch.no_grad():
        exact = digits.denoiser(**inputs)
    assert rounded.dtype == torch.bfloat16 and exact.dtype == torch.float32
    assert 1e-4 < relative_error(rounded.float(), exact) < 0.05
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert all(timestep.tolist() == [999.0, 1.0] for _, timestep in seen)  # BF16 would make 1,000 of the first


def test_the_torch_model_with_a_bundles_tables_computes_what_the_bundle_does(digits_build, digits):
    bundle = runtime.load(digits_build.bundle)
    inputs = digits.example(3, {"batch": 4, "height": 8, "width": 8})
    int8 = TorchInt8(digits, bundle.folder, bundle.manifest)(**inputs)
    assert relative_error(int8, bundle["denoiser"](**inputs)) < WHOLE_DENOISER
    with torch.no_grad():
        full = digits.denoiser(**inputs)
    assert relative_error(int8, full) > 1e-4  # it is not the model itself


def test_the_watch_names_the_site_whose_int8_attention_breaks(digits_build, digits, tmp_path, monkeypatch):
    bundle = runtime.load(digits_build.bundle)
    calibration = Calibration.load(digits_build.bundle / bundle.manifest.calibration)
    calibration.tables["blocks.2.attn"]["k_offset"][0, 1, 0] = torch.nan  # the last steps' bin
    with monkeypatch.context() as patch:  # no file with NaN is read
        patch.setattr(torch_int8, "load_of_bundle", lambda *_: calibration)
        int8 = TorchInt8(digits, bundle.folder, bundle.manifest)
    digits.sample(int8, range(3), steps=4, solver="ddim")
    found = int8.take_nonfinite()["site"]
    assert found.pop("blocks.2.attn") == 3 and found["blocks.1.attn"] == 0
    assert int8.take_nonfinite() == {"site": {}, "layer": {}}
    # A shard counts its own samples, and not those that were drawn before, such as those with all steps.
    digits.sample(int8, range(3), steps=4, solver="ddim")
    drawing = Drawing(digits.sample, 3, Request(steps=4))
    shard = Pairs(int8, digits, drawing, load_extractor("digits-classifier"), None, None).make(range(3))
    assert int(shard["int8-site.blocks.2.attn"]) == 3

    evaluated = run(*digits_arguments(digits_build, tmp_path, "--weights", WEIGHTS, "--int8", "torch"))
    assert evaluated.exit_code == 0, evaluated.output
    paired = read_evaluation(tmp_path / "out.json").paired
    assert set(paired.nonfinite_int8_sites.values()) == {0} and len(paired.nonfinite_int8_sites) == 6
    broken = paired.model_copy(update={"nonfinite_int8_sites": {"blocks.2.attn": 3}})
    line = watch_line(read_evaluation(tmp_path / "out.json").model_copy(update={"paired": broken}))
    assert "sites in INT8: blocks.2.attn 3" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_noticed(digits_build, tmp_path):
    outcome = run(*digits_arguments(digits_build, tmp_path, "--weights", WEIGHTS, "--device", "cuda"))
    refusal(outcome, "there is no GPU to run the model on", "--device cuda")
    refusal(
        run("calibrate", digits_build.recipe, "--device", "cuda", "-o", tmp_path / "c"),
        "on a GPU here",
        "no NVIDIA GPU",
    )
    refusal(run("measure", "-o", tmp_path / "cost.json"), "there is no GPU", "plan.kernel_cost")


def test_without_weights_there_is_nothing_to_pair(digits_build, tmp_path):
    assert run(*digits_arguments(digits_build, tmp_path)).exit_code == 0
    found = read_evaluation(tmp_path / "out.json")
    assert found.full is None and found.other is None and found.paired is None
    assert found.int8.fid is not None


def test_the_figures_are_those_of_the_samples_themselves(tiny, tiny_build, reference, tmp_path, monkeypatch):
    """Recomputes the figures from whole sets, whereas the evaluation merges three shards."""
    monkeypatch.setattr(evaluation, "SHARD", 8)
    assert run(*tiny, "--samples", 20, "--work", tmp_path, "-o", tmp_path / "out.json").exit_code == 0
    found = read_evaluation(tmp_path / "out.json")
    bundle = runtime.load(tiny_build.bundle)
    model = models.load(bundle.manifest.recipe.model)
    target = load_reference(str(reference), TINY_SHAPE).read(range(40)).flatten(1)

    def drawn(denoiser, first):
        return torch.cat([model.sample(denoiser, [first + i], steps=2, solver="ddim") for i in range(20)]).flatten(1)

    int8, full = drawn(bundle["denoiser"], found.seed), drawn(model.denoiser, found.seed)
    other = drawn(model.denoiser, found.seed + 20)
    for images, quality in ((int8, found.int8), (full, found.full), (other, found.other)):
        fid = metrics.frechet_distance(metrics.Moments.of(images), metrics.Moments.of(target))
        assert quality.fid == pytest.approx(fid, rel=EIGENVALUES)
        assert (quality.precision, quality.recall) == metrics.precision_recall(images, target)
    errors = (int8.double() - full.double()).square().mean(1)
    assert found.paired.psnr == pytest.approx(-10 * float(errors.mean().log10()), abs=0.1)
    assert found.paired.psnr_worst_seed == found.seed + int(errors.argmax())
    assert found.int8.accuracy is None and found.int8.inception_score is None  # pixels have no classes


def test_nan_and_inf_are_counted_and_kept_out_of_the_figures(tiny_build, reference, tmp_path, monkeypatch):
    loaded = runtime.load(tiny_build.bundle)
    calls = iter(range(10_000))

    class Poisoned:
        """Writes NaN into a sample of the tenth call, and Inf, which clamping would hide, into one of the twelfth."""

        device, signature = torch.device("cpu"), loaded["denoiser"].signature

        def __call__(self, *inputs, **named):
            output = loaded["denoiser"](*inputs, **named).clone()
            call = next(calls)
            if call in (10, 12):
                output[0, 0, 0, 0] = {10: torch.nan, 12: torch.inf}[call]
            return output

    monkeypatch.setattr(runtime, "load", lambda _: replace(loaded, components={"denoiser": Poisoned()}))
    request = Request(samples=20, steps=2, features="tiny_features:pixels", reference=str(reference))
    found = evaluation.evaluate(tiny_build.bundle, request, tmp_path, ALONE, reporter())
    assert found.int8.nonfinite == 2 and found.full.nonfinite == 0
    assert found.int8.fid == found.int8.fid and found.paired.psnr > 20


def test_a_decoder_that_overflows_is_counted_too(tiny_build, reference, tmp_path, monkeypatch):
    source = models.load(runtime.load(tiny_build.bundle).manifest.recipe.model)

    def overflowing(denoiser, seeds, **options):
        images = source.sample(denoiser, seeds, **options)
        images[[seed % 7 == 0 for seed in seeds]] = torch.nan
        return images

    monkeypatch.setattr(models, "load", lambda *_: replace(source, sample=overflowing))
    request = Request(samples=20, steps=2, features="tiny_features:pixels", reference=str(reference))
    found = evaluation.evaluate(tiny_build.bundle, request, tmp_path, ALONE, reporter())
    broken = sum(seed % 7 == 0 for seed in range(found.seed, found.seed + 20))
    assert found.int8.nonfinite == found.full.nonfinite == broken and found.paired.psnr > 20


def test_a_pipeline_in_torch_is_drawn_in_batches_of_its_own(tiny_build, reference, tmp_path, monkeypatch):
    source = models.load(runtime.load(tiny_build.bundle).manifest.recipe.model)

    def in_parts(denoiser, seeds, **options):
        return torch.cat([source.sample(denoiser, seeds[i : i + 2], **options) for i in range(0, len(seeds), 2)])

    monkeypatch.setattr(models, "load", lambda *_: replace(source, sample=in_parts, diffusers=object()))
    request = Request(samples=20, steps=2, features="tiny_features:pixels", reference=str(reference), int8="torch")
    found = evaluation.evaluate(tiny_build.bundle, request, tmp_path, ALONE, reporter())
    assert found.int8.nonfinite == found.full.nonfinite == 0 and found.paired.psnr > 20


def test_samples_of_another_backend_are_drawn_anew(tiny_build, reference, tmp_path, monkeypatch):
    """A bundle may run in TensorRT and in ONNX Runtime with the same work folder."""
    request = Request(samples=20, steps=2, features="tiny_features:pixels", reference=str(reference))
    evaluation.evaluate(tiny_build.bundle, request, tmp_path, ALONE, reporter())
    before = {path.name for path in tmp_path.iterdir()}
    loaded = runtime.load(tiny_build.bundle)
    monkeypatch.setattr(runtime, "load", lambda _: replace(loaded, backend="TensorRT on another GPU"))
    evaluation.evaluate(tiny_build.bundle, request, tmp_path, ALONE, reporter())
    assert [name.partition("-")[0] for name in {path.name for path in tmp_path.iterdir()} - before] == ["pairs"]


def test_a_reference_is_another_one_when_its_colours_are_read(reference):
    grey, colours = (load_reference(str(reference), torch.Size([channels, 4, 4])) for channels in (1, 3))
    assert grey.identity != colours.identity


def test_the_reference_is_the_folder_and_all_below_it(reference):
    loaded = load_reference(str(reference), TINY_SHAPE)
    assert loaded.count == 40
    images = loaded.read(range(38, 40))
    assert images.shape == (2, 1, 4, 4) and images.min() >= 0 and images.max() <= 1
    assert load_reference(str(reference), torch.Size([3, 4, 4])).read(range(1)).shape == (1, 3, 4, 4)


# Kills and ranks


@pytest.mark.soak
def test_a_killed_evaluation_goes_on_where_it_was(tiny, tmp_path):
    whole = finish(start(*tiny, "--work", tmp_path / "whole", "-o", tmp_path / "whole.json"))
    assert whole.exit_code == 0, whole.output

    work = tmp_path / "killed"
    process = start(*tiny, "--work", work, "-o", tmp_path / "killed.json")
    deadline = time.monotonic() + 120
    while not (kept := sorted(work.glob("*/*.safetensors"))) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in kept}
    assert kept and not (tmp_path / "killed.json").exists()
    for path in kept:  # as after a kill right behind a finished shard
        path.with_name(f".{path.name}{PARTIAL}killed_1").mkdir()

    again = finish(start(*tiny, "--work", work, "-o", tmp_path / "killed.json"))
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # not made anew
    assert not partials(*(path for path in work.iterdir()))
    assert outcome_of(tmp_path / "killed.json") == outcome_of(tmp_path / "whole.json")


@pytest.mark.soak
def test_two_ranks_find_what_one_finds(tiny, tmp_path):
    one = finish(start(*tiny, "--work", tmp_path / "one", "-o", tmp_path / "one.json"))
    assert one.exit_code == 0, one.output
    two = torchrun(2, *tiny, "--work", tmp_path / "two", "-o", tmp_path / "two.json", timeout=300)
    assert outcome_of(tmp_path / "two.json") == outcome_of(tmp_path / "one.json")  # to the last bit
    assert two.stdout.count("FID") == one.output.count("FID")  # one rank speaks


@pytest.mark.soak
def test_a_full_disk_keeps_finished_shards(tiny, tmp_path):
    # A limit on file sizes stands for a full disk: only whole shards exceed it.
    arguments = [*tiny, "--samples", evaluation.SHARD + 10, "--work", tmp_path / "work", "-o", tmp_path / "out.json"]
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 14; trap "" XFSZ; exec "$0" -m trtconvert.cli "$@"', sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert limited.returncode == 2, limited.stderr
    assert "the disk is full while writing" in limited.stderr and "remedy: " in limited.stderr
    assert not (tmp_path / "out.json").exists() and not partials(*(tmp_path / "work").iterdir())
    again = finish(start(*arguments))
    assert again.exit_code == 0, again.output


def test_a_damaged_shard_is_made_anew(tmp_path):
    made = []

    def make(held):
        made.append(held)
        return {"pooled": torch.arange(held.start, held.stop)}

    work = ShardSet.at(tmp_path, "set", CODE, {"seed": 1}, 10, 4)
    work.make(make, ALONE, lambda: None)
    path = work.path(1)
    path.write_bytes(path.read_bytes()[:-8])
    work.make(make, ALONE, lambda: None)
    assert made == [range(4), range(4, 8), range(8, 10), range(4, 8)]
    assert torch.cat([shard["pooled"] for shard in work.stream()]).tolist() == list(range(10))


def test_shards_are_found_again_by_all_that_made_them(tmp_path, monkeypatch):
    folder = ShardSet.at(tmp_path, "set", CODE, {"seed": 1}, 10, 4).folder
    assert ShardSet.at(tmp_path, "set", CODE, {"seed": 1}, 500, 4).folder == folder  # more samples reuse the first
    assert ShardSet.at(tmp_path, "set", CODE, {"seed": 2}, 10, 4).folder != folder
    assert ShardSet.at(tmp_path, "set", CODE, {"seed": 1}, 10, 5).folder != folder
    monkeypatch.setattr(shards, "code_identity", lambda *_: "other code")
    assert ShardSet.at(tmp_path, "set", CODE, {"seed": 1}, 10, 4).folder != folder


# What it refuses


def test_weights_of_another_model(digits_build, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(WEIGHTS.read_bytes()[:-4] + b"\0\0\0\0")
    outcome = run(*digits_arguments(digits_build, tmp_path, "--weights", other))
    refusal(outcome, "is not what the bundle was made from")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--weights", "missing.safetensors"], ["missing.safetensors"]),
        (["--features", "resnet"], ["there is no feature extractor 'resnet'"]),
        (["--features", "inception"], ["need weights", "--features-weights"]),
        (["--reference", "missing"], ["missing has no images", "no such folder"]),
        (["--weights", WEIGHTS, "--lpips-weights", "missing.pth"], ["missing.pth", "AlexNet"]),
        (["--steps", "2000"], ["1 to 1000"]),
        (["--int8", "torch"], ["needs the model", "no --weights"]),
        (["--device", "cuda"], ["needs the model", "no --weights"]),
        (["--dtype", "float16"], ["needs the model", "no --weights", "leave --dtype out"]),
        (["--lpips-weights", "missing.pth"], ["needs the model", "no --weights", "leave --lpips-weights out"]),
        (["--device", "cuda", "--int8", "torch"], ["leave --int8 and --device out"]),
    ],
)
def test_bad_requests(digits_build, tmp_path, arguments, parts):
    refusal(run(*digits_arguments(digits_build, tmp_path, *arguments)), *parts)


def test_a_place_that_cannot_be_written_is_noticed_before_samples_are_drawn(tiny, tmp_path):
    (tmp_path / "out.json").mkdir()
    outcome = run(*tiny, "--work", tmp_path / "work", "-o", tmp_path / "out.json")
    refusal(outcome, "out.json", "give another file with -o")
    assert not (tmp_path / "work").exists()


def test_a_missing_package_is_noticed_before_samples_are_drawn(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity.metric_fid", None)
    refusal(
        run(*tiny, "--work", tmp_path / "work", "-o", tmp_path / "out.json"), "torch-fidelity", "trtconvert[evaluate]"
    )
    assert not (tmp_path / "work").exists()


def test_a_reference_of_another_size(tiny, tmp_path):
    outcome = run(*tiny, "--reference", "digits", "--work", tmp_path, "-o", tmp_path / "out.json")
    refusal(outcome, "[1, 4, 4]", "[1, 8, 8]")


def half(images):
    """Features may overflow, as in FP16."""
    return (images.flatten(1) * 1e5).half()


def test_features_that_overflow_are_noticed_before_samples_are_drawn(tiny, tmp_path):
    outcome = run(*tiny, "--features", "test_evaluate:half", "--work", tmp_path, "-o", tmp_path / "out.json")
    refusal(outcome, "'test_evaluate:half' gives NaN or Inf", "pooled", "--features")
    assert not list(tmp_path.glob("pairs-*"))


def test_a_reference_of_a_few_images(tiny, reference, tmp_path):
    (tmp_path / "few").mkdir()
    for path in sorted(reference.rglob("*.png"))[:3]:
        shutil.copy(path, tmp_path / "few")
    outcome = run(*tiny, "--reference", tmp_path / "few", "--work", tmp_path / "work", "-o", tmp_path / "out.json")
    refusal(outcome, "few has too few images", "got: 3", "give a folder with more images")


def test_a_reference_that_does_not_fit_is_noticed_before_samples_are_drawn(tiny, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "unfit")
    Image.new("L", (5, 6)).save(tmp_path / "unfit" / "z.png")
    outcome = run(*tiny, "--reference", tmp_path / "unfit", "--work", tmp_path / "work", "-o", tmp_path / "out.json")
    refusal(outcome, "z.png has the wrong size")
    assert not list((tmp_path / "work").glob("pairs-*"))


@pytest.mark.parametrize(("content", "part"), [("size", "got: 5 × 6"), ("text", "cannot read the image")])
def test_bad_reference_images_are_named(reference, tmp_path, content, part):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "-one.png"
    if content == "size":
        Image.new("L", (5, 6)).save(path)
    else:
        path.write_text("not an image")
    with pytest.raises(UserError, match=r"one\.png") as error:
        load_reference(str(tmp_path), TINY_SHAPE).read(range(1))
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "got"), [("{", "Expecting"), ("{}", "created: "), (json.dumps({"format": 2}), "format: ")]
)
def test_files_that_are_no_evaluation(tmp_path, content, got):
    path = tmp_path / "evaluation.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not an evaluation") as error:
        read_evaluation(path)
    assert error.value.got.startswith(got)


def test_auto_takes_the_gpu_where_the_model_fits_and_says_so(digits_build, tmp_path, monkeypatch):
    taken = []

    def choose(section, model):
        taken.append((section.device, section.offload, model.weights, model.dtype))
        return Place("cuda", "float32", "NVIDIA H100, in float32", section.offload == "on")

    def stop(model, device, offload):
        raise InterruptedError(f"{device}, {offload}")

    monkeypatch.setattr("trtconvert.evaluate.evaluation.choose_place", choose)
    monkeypatch.setattr("trtconvert.evaluate.evaluation.on_device", stop)
    console = Console(record=True, width=200, file=io.StringIO())
    asked = (("auto", False, "cuda, False"), ("cpu", False, "cpu, False"), ("cuda", True, "cuda, True"))
    for device, offload, chosen in asked:
        request = Request(weights=WEIGHTS, samples=2, steps=2, device=device, offload=offload)
        with pytest.raises(InterruptedError, match=chosen):
            evaluation.evaluate(digits_build.bundle, request, tmp_path, ALONE, Reporter(console))
    assert taken == [("auto", "auto", WEIGHTS, "float32"), ("cuda", "on", WEIGHTS, "float32")]
    assert "computes on the cuda: NVIDIA H100, in float32" in console.export_text()


def test_a_figure_that_int8_samples_lack_has_no_row():
    known, lacking = (SetQuality(nonfinite=0, fid=2.0, recall=recall) for recall in (0.5, None))
    evaluation = Evaluation.model_construct(int8=lacking, full=known, other=known)
    assert rows(evaluation) == [Row("FID ↓", "2.000", "2.000", "2.000", "+0.000", "0.000", True)]
    alone = Evaluation.model_construct(int8=known, full=None, other=None)
    assert rows(alone) == [Row("FID ↓", "2.000"), Row("recall ↑", "0.5000")]
