"""Where the main job computes: which device is taken and why, and what a placed copy computes."""

from __future__ import annotations

import pytest
import torch
from support import REPOSITORY
from torch import nn

from trtconvert.errors import BackendUnavailable
from trtconvert.models import placement
from trtconvert.models.digits import digits_model
from trtconvert.models.placed import Place, _casting, _copied, _in_float32, placed
from trtconvert.models.placement import choose_place
from trtconvert.recipe import ComputeSection, ModelSection

SECTION = ModelSection(source="digits-dit", weights=REPOSITORY / "recipes/digits-dit.safetensors", dtype="float16")


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H100, as far as the choice is concerned."""

    def having(architecture: str | None = "sm90", free: int = 80 * 2**30, library: bool = True) -> None:
        monkeypatch.setattr(placement.tensorrt, "device_architecture", lambda: architecture)
        monkeypatch.setattr(placement.tensorrt, "device_name", lambda: "NVIDIA H100")
        monkeypatch.setattr(placement.tensorrt, "cuda_problem", lambda: "")
        monkeypatch.setattr(placement, "library_path", lambda: REPOSITORY if library else None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))

    return having


def test_the_gpu_is_taken_where_the_model_fits(gpu):
    gpu()
    place = choose_place(ComputeSection(), SECTION)
    assert (place.device, place.dtype) == ("cuda", "float16")
    assert "NVIDIA H100" in place.reason
    assert place.reads() == {"device": "cuda", "precision": "float16"}


def test_full_precision_is_float32_where_that_is_asked_for(gpu):
    gpu()
    assert choose_place(ComputeSection(precision="float32"), SECTION).dtype == "float32"


@pytest.mark.parametrize(
    ("having", "reason"),
    [
        ({"architecture": None}, "no NVIDIA GPU"),
        ({"architecture": "sm75"}, "is sm75, the kernels need sm80"),
        ({"library": False}, "libtrtconvert.so"),
        ({"free": 2**20}, "GiB free, less than 1.3 times"),
    ],
)
def test_the_cpu_is_taken_where_no_gpu_serves_and_the_reason_is_said(gpu, having, reason):
    gpu(**having)
    place = choose_place(ComputeSection(), SECTION)
    assert (place.device, place.dtype, place.reads()) == ("cpu", "float32", {})
    assert reason in place.reason
    if "free" not in having:  # a GPU that is asked for is tried, whatever the files' sizes are
        with pytest.raises(BackendUnavailable, match="GPU"):
            choose_place(ComputeSection(device="cuda"), SECTION)


def test_the_cpu_is_taken_where_it_is_asked_for(gpu):
    gpu()
    assert choose_place(ComputeSection(device="cpu"), SECTION) == Place("cpu", "float32", "compute.device is cpu")


def test_on_a_cpu_the_model_is_itself():
    model = digits_model(REPOSITORY / "recipes/digits-dit.safetensors")
    assert placed(model, Place("cpu", "float32", "")) is model


class Kept(nn.Module):
    _keep_in_fp32_modules = ("time",)

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = self.body
        self.register_buffer("steps", torch.arange(4))


def test_a_copy_has_its_own_weights_in_a_type_but_for_what_the_model_keeps():
    model = Kept()
    copy = _copied(model, torch.device("cpu"), torch.float16)
    assert copy.body.weight.dtype == torch.float16 and copy.time.weight.dtype == torch.float32
    assert copy.steps.dtype == torch.int64
    assert copy.tied is copy.body
    assert model.body.weight.dtype == torch.float32 and copy.body.weight is not model.body.weight
    assert not any(x.requires_grad for x in copy.parameters())


def test_a_placed_denoiser_casts_inputs_but_timesteps_and_gives_float32():
    seen = {}

    class Denoiser(nn.Module):
        def forward(self, x, timestep, label):
            seen.update(x=x.dtype, timestep=timestep.dtype, label=label.dtype)
            return (x * 2,)

    denoiser = Denoiser()
    hook = _casting(["x", "timestep", "label"], {"x"}, torch.bfloat16)
    denoiser.register_forward_pre_hook(hook, with_kwargs=True)
    denoiser.register_forward_hook(_in_float32)
    x, timestep, label = torch.ones(2, 3), torch.ones(2), torch.ones(2, dtype=torch.int64)
    for output in (denoiser(x, timestep, label), denoiser(x=x, timestep=timestep, label=label)):
        assert output.dtype == torch.float32 and output.eq(2).all()
    assert seen == {"x": torch.bfloat16, "timestep": torch.float32, "label": torch.int64}
