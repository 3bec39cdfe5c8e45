"""The documentation's Python runs as it is printed, page by page, each page's blocks one after the other.

What a page assumes is there (a pipeline, a model, a bundle in a folder) comes from its stand-ins, and "cuda" is the CPU.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import Block, blocks
from stated_steps import StatedSteps
from support import run
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trtconvert.attention import Int8Attention
from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable
from trtconvert.modiff import AdaRound, Calibration, Modulated, qdiff
from trtconvert.runtime import LoadedBundle, load
from trtconvert.runtime.diffusers import DiffusersDenoiser
from trtconvert.runtime.reuse import Reusable
from trtconvert.weights import Int8Linear

CODE = blocks("python")


@dataclass(frozen=True)
class Place:
    """The empty current folder of a page's run.

    Attributes:
        request: for fixtures that only some pages need.
    """

    folder: Path
    request: pytest.FixtureRequest
    patches: pytest.MonkeyPatch

    def put(self, name: str, existing: Path) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).symlink_to(existing)

    def draw_little(self, pipeline: type, **given: Any) -> None:
        """Sets default arguments of calls."""
        call: Any = pipeline.__call__

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **given | kwargs)

        self.patches.setattr(pipeline, "__call__", called)


class OnCpu(TorchFunctionMode):
    """Puts tensors for a GPU on the CPU. Names of devices stay the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.device:
            return func(*args, **kwargs or {})
        if func == Tensor.cuda:
            return args[0]
        args = tuple(_on_cpu(x) for x in args)
        return func(*args, **{name: _on_cpu(x) for name, x in (kwargs or {}).items()})


def _on_cpu(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, str | torch.device) and str(x).partition(":")[0] == "cuda" else x


# What blocks assume ---------------------------------------------------------------------------------------------------

Names = dict[str, Any]
STAND_INS = dict[tuple[str, str], Callable[[Place], Names]]()
"""By the page and a part of the block that needs them; the page's later blocks have them too."""


def before(page: str, part: str) -> Callable[[Callable[[Place], Names]], Callable[[Place], Names]]:
    def noted(stand_ins: Callable[[Place], Names]) -> Callable[[Place], Names]:
        STAND_INS[page, part] = stand_ins
        return stand_ins

    return noted


@before("quickstart.md", "FluxPipeline.from_pretrained")
def saved_pipeline(place: Place) -> Names:
    flux = place.request.getfixturevalue("flux_build")
    place.put("my-pipeline", flux.pipeline)
    place.put("out/my-pipeline", flux.bundle)
    import diffusers

    # What the bundle was built for.
    place.draw_little(diffusers.FluxPipeline, height=32, width=32, num_inference_steps=2, max_sequence_length=8)
    return {}


@before("converting.md", "# or pipe.unet")
def pipeline_and_bundles(place: Place) -> Names:
    saved_pipeline(place)
    place.put("out/digits-dit", place.request.getfixturevalue("digits_build").bundle)
    import diffusers

    return {"pipe": diffusers.FluxPipeline.from_pretrained("my-pipeline", transformer=None)}


@before("README.md", "optimize(pipe")
@before("converting.md", "optimize(pipe")
def another_pipeline(place: Place) -> Names:
    import tiny_pipelines

    return {"pipe": tiny_pipelines.with_text("stable_diffusion")}


@before("components.md", ".pipeline()")
def bundle_of_a_whole_pipeline(place: Place) -> Names:
    return saved_pipeline(place)


@before("converting.md", "denoiser(x, timestep, label)")
def digits_inputs(place: Place) -> Names:
    return {"x": torch.randn(2, 1, 8, 8), "timestep": torch.tensor([500.0, 20.0]), "label": torch.tensor([3, 7])}


@before("reuse.md", "as_diffusers()")
def pipeline_and_its_bundle(place: Place) -> Names:
    saved_pipeline(place)
    import diffusers

    pipe = diffusers.FluxPipeline.from_pretrained("my-pipeline", transformer=None)
    return {"pipe": pipe, "bundle": load("out/my-pipeline")}


@before("reuse.md", "runtime.follow")
def trajectory(place: Place) -> Names:
    left_out = Reusable(lambda x, timestep: x * timestep.view(-1, 1), StatedSteps([True, True, False, True]))
    return {"bundle": {"denoiser": left_out}, "timesteps": [800.0, 600.0, 400.0, 200.0], "x": torch.ones(2, 4)}


def sampler(denoiser: Callable[[Tensor, Tensor], Tensor], noise: Tensor) -> Tensor:
    """Euler's method for a model that predicts noise."""
    x = noise
    for step in range(12, 0, -1):
        x = x - denoiser(x, torch.full((len(x),), step * 80.0)) / 12
    return x


@before("modiff.md", 'scales="dynamic"')
def model_and_sampler(place: Place) -> Names:
    return {"model": denoiser(), "sampler": sampler, "noise": torch.randn(2, 3, 8, 8)}


@before("modiff.md", "calibrate(model, paths")
def fresh_model(place: Place) -> Names:
    """A few rounds in place of thousands."""
    place.patches.setattr(qdiff, "AdaRound", functools.partial(AdaRound, iterations=4))
    return {"model": denoiser(), "batches": torch.randn(2, 2, 3, 8, 8)}


class Denoiser(nn.Module):
    """Two convolutions with enough channels to be replaced, and one for the image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.leave = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        h = self.enter(x * (1 + timestep[:, None, None, None].to(x.dtype) / 1000))
        return self.leave(self.mix(h.relu()).relu())


def denoiser() -> nn.Module:
    torch.manual_seed(0)
    return Denoiser().eval().requires_grad_(False)


@before("production.md", "graphs=4, streams=4")
def a_bundle(place: Place) -> Names:
    place.put("out/my-pipeline", place.request.getfixturevalue("digits_build").bundle)
    return {}


@before("pytorch.md", "replace_attention_with_int8(pipe)")
def pipeline_with_attention(place: Place) -> Names:
    import tiny_pipelines

    pipe = tiny_pipelines.with_text("stable_diffusion")
    place.draw_little(type(pipe), num_inference_steps=2)
    return {"pipe": pipe}


@before("sequence-parallel.md", 'init_process_group("nccl")')
def one_process(place: Place) -> Names:
    """A process group of one process on the CPU."""
    start = dist.init_process_group
    meeting = {"init_method": f"file://{place.folder}/meeting", "rank": 0, "world_size": 1}
    place.patches.setattr(dist, "init_process_group", lambda backend: start("gloo", **meeting))
    place.request.addfinalizer(lambda: dist.is_initialized() and dist.destroy_process_group())
    return {name: torch.randn(1, 24, 128, 128) for name in "QKV"}


@before("scales.md", "check=True")
def a_bundle_to_check(place: Place) -> Names:
    return a_bundle(place)


@before("weights.md", "load_quantized(pipe")
def pipeline_in_int8(place: Place) -> Names:
    import tiny_pipelines

    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained("saved")
    outcome = run("quantize", "saved", "-o", "OUT", "--min-elements", "256")
    assert outcome.exit_code == 0, outcome.output
    return {"pipe": pipe}


# What must have come of them ------------------------------------------------------------------------------------------

OUTCOMES = dict[str, Callable[[Names, str], None]]()
"""Checks of each page on the names after the last block, and on the printed text."""


def after(page: str) -> Callable[[Callable[[Names, str], None]], Callable[[Names, str], None]]:
    def noted(outcome: Callable[[Names, str], None]) -> Callable[[Names, str], None]:
        OUTCOMES[page] = outcome
        return outcome

    return noted


@after("quickstart.md")
def drawn_by_the_bundle(found: Names, printed: str) -> None:
    from PIL import Image

    assert isinstance(found["pipe"].transformer, DiffusersDenoiser)
    assert Image.open("bicycle.png").size == (32, 32)


@after("components.md")
def draws_by_itself(found: Names, printed: str) -> None:
    assert found["pipe"]("a red bicycle").images[0].size == (32, 32)


@after("converting.md")
def in_the_pipeline_and_by_itself(found: Names, printed: str) -> None:
    pipe, prediction = found["pipe"], found["prediction"]
    assert isinstance(pipe.transformer, DiffusersDenoiser)
    assert prediction.shape == (2, 1, 8, 8) and prediction.isfinite().all()


@after("entry-points.md")
def draws_by_its_sampler(found: Names, printed: str) -> None:
    model = found["load"]()
    images = model.sample(model.denoiser, [1, 2], steps=2, solver="ddim")
    assert images.shape == (2, 3, 16, 16) and images.isfinite().all()
    assert found["labels_of"](["4", ""])["label"].tolist() == [4, 0]


@after("sigma.md")
def follows_sigma(found: Names, printed: str) -> None:
    seen: list[float] = []

    def half(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(float(sigma[0]))
        return x / 2

    images = found["edm_model"](nn.Linear(1, 1)).sample(half, [1], steps=2, solver="ddim")
    assert images.shape == (1, 3, 16, 16) and seen == pytest.approx([80.0, 0.002])


@after("modiff.md")
def modulated_in_half_precision(found: Names, printed: str) -> None:
    assert found["image"].shape == (2, 3, 8, 8)
    assert isinstance(found["found"], Calibration) and isinstance(found["fresh"], Modulated)
    exact = sampler(denoiser(), found["noise"])
    drawn = sampler(found["fresh"], found["noise"].half()).float()
    assert float((drawn - exact).norm() / exact.norm()) < 0.1


@after("pytorch.md")
def attention_in_int8(found: Names, printed: str) -> None:
    assert "8 attention modules compute in INT8, 0 do not" in printed


@after("attention-module.md")
def a_module_that_is_kept(found: Names, printed: str) -> None:
    cond, uncond = found["output_cond"], found["output_uncond"]
    torch.testing.assert_close(found["guided"], uncond + 7.5 * (cond - uncond), rtol=1e-2, atol=1e-2)
    loaded = Int8Attention(8, 64)
    loaded.load_state_dict(torch.load("attention.pt"))
    assert loaded.calibrated
    assert found["Q"].grad is not None


@after("windows.md")
def keys_are_dropped(found: Names, printed: str) -> None:
    assert found["kept_mask"].float().mean() == pytest.approx(0.8, abs=0.01)


@after("sequence-parallel.md")
def tokens_of_this_process(found: Names, printed: str) -> None:
    assert found["output"].shape == (1, 24, 128, 128)


@after("int4.md")
def emulated(found: Names, printed: str) -> None:
    assert found["output"].shape == found["Q"].shape


@after("reuse.md")
def a_step_is_left_out(found: Names, printed: str) -> None:
    assert isinstance(found["pipe"].transformer, DiffusersDenoiser)
    assert (found["denoiser"].calls, found["denoiser"].computed) == (4, 3)
    torch.testing.assert_close(found["prediction"], torch.full((2, 4), 200.0))


@after("scales.md")
def watched(found: Names, printed: str) -> None:
    bundle = found["bundle"]
    assert isinstance(bundle, LoadedBundle)
    with pytest.warns(match="times as large as in its calibration"), bundle:
        bundle["denoiser"](torch.full((1, 1, 8, 8), 1e4), torch.tensor([500.0]), torch.tensor([3]))


@after("weights.md")
def layers_in_int8(found: Names, printed: str) -> None:
    assert any(isinstance(module, Int8Linear) for module in found["pipe"].unet.modules())


# The tests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeedsGpu:
    """A block that no stand-in runs on a CPU.

    Attributes:
        refusal: what the program says of it where there is no GPU.
    """

    why: str
    refusal: str


NEED_GPU = {
    ("README.md", "optimize(pipe"): NeedsGpu(
        "the GPU that it builds an engine for; tests/models/test_optimize.py converts for a CPU",
        "no engine can be built on this machine",
    ),
    ("converting.md", "optimize(pipe"): NeedsGpu(
        "the GPU that it builds an engine for; tests/models/test_optimize.py converts for a CPU",
        "no engine can be built on this machine",
    ),
    ("production.md", "graphs=4, streams=4"): NeedsGpu(
        "streams, CUDA graphs and refit are an engine's; tests/gpu/runtime/test_documented_calls.py runs it",
        "cannot run on 'cuda:0'",
    ),
}
"""By the page and a part of the block."""


def of_block(block: Block, parts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the keys of a table for this block."""
    return [(page, part) for page, part in parts if page == block.page.name and part in block.text]


RUN = [block for block in CODE if not of_block(block, NEED_GPU)]
SLOW = {"components.md", "windows.md"}
"""Pages with a build of their own, for `make soak`."""


@pytest.fixture
def place(request, monkeypatch, tmp_path) -> Iterator[Place]:
    with chdir(tmp_path), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield Place(tmp_path, request, monkeypatch)


def names_for(block: Block, place: Place) -> Names:
    found: Names = {}
    for key in of_block(block, STAND_INS):
        found |= STAND_INS[key](place)
    used = {node.id for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)}
    assert found.keys() <= used, "names that the block does not use"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.soak) if page in SLOW else page
        for page in sorted({block.page.name for block in RUN})
    ],
)
def test_a_page_runs(page, place, capsys):
    found: Names = {"__name__": "documented"}
    for block in RUN:
        if block.page.name == page:
            found |= names_for(block, place)
            with OnCpu():
                block.run(found)
    if page in OUTCOMES:
        OUTCOMES[page](found, capsys.readouterr().out)


@pytest.mark.skipif(tensorrt.status().available, reason="looks at a machine without TensorRT")
@pytest.mark.parametrize("page_and_part", NEED_GPU, ids=lambda of: of[0])
def test_gpu_only_features_say_so_elsewhere(page_and_part, place):
    """A block that runs must leave the list."""
    (block,) = [block for block in CODE if page_and_part in of_block(block, NEED_GPU)]
    found = names_for(block, place)
    with pytest.raises(BackendUnavailable, match=NEED_GPU[page_and_part].refusal), OnCpu():
        block.run(found)


@pytest.mark.parametrize("table", [STAND_INS, NEED_GPU], ids=["stand-ins", "need a GPU"])
def test_each_entry_is_of_one_block(table):
    for key in table:
        assert len([block for block in CODE if key in of_block(block, table)]) == 1, key


def test_each_page_that_runs_has_an_outcome():
    assert OUTCOMES.keys() == {block.page.name for block in RUN}
