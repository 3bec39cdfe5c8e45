"""The device of the main job: the choice and its reason, and the computation of a placed copy."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from support import REPOSITORY
from torch import nn

from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models import placement
from trtconvert.models.digits import digits_model
from trtconvert.models.placed import Place, _casting, _copied, _in_float32, placed
from trtconvert.models.placement import choose_place
from trtconvert.recipe import ComputeSection, ModelSection

SECTION = ModelSection(source="digits-dit", weights=REPOSITORY / "recipes/digits-dit.safetensors", dtype="float16")


@pytest.fixture
def gpu(monkeypatch):
    """Makes the choice see a machine with an H100."""

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
    if "free" not in having:  # a GPU that the recipe asks for is tried, whatever the sizes of files
        with pytest.raises(BackendUnavailable, match="GPU"):
            choose_place(ComputeSection(device="cuda"), SECTION)


def test_the_cpu_is_taken_where_it_is_asked_for(gpu):
    gpu()
    assert choose_place(ComputeSection(device="cpu"), SECTION) == Place("cpu", "float32", "compute.device is cpu")


def weights_of(folder, blocks: int, size: int = 2**18):
    """Writes a pipeline's denoiser of so many blocks, and a layer outside of blocks; each has so many 16-bit numbers."""
    (folder / "transformer").mkdir()
    names = [
        "proj_in.weight",
        *(f"transformer_blocks.{n}.{layer}.weight" for n in range(blocks) for layer in ("0", "ff")),
    ]
    tensors = {name: torch.zeros(size // (1 if name == names[0] else 2), dtype=torch.bfloat16) for name in names}
    save_file(tensors, folder / "transformer/diffusion_pytorch_model.safetensors")
    return ModelSection(source="diffusers", weights=folder, dtype="bfloat16")


@pytest.mark.parametrize(("free", "offload"), [(2**23, False), (2**22, True), (int(1.31 * 1.5 * 2**20), True)])
def test_a_model_that_is_larger_than_the_gpu_computes_there_block_by_block(gpu, tmp_path, free, offload):
    model = weights_of(tmp_path, 10)  # 5.5 MiB; two blocks and the other layer are 1.5 MiB
    gpu(free=free)
    for device in ("auto", "cuda"):
        place = choose_place(ComputeSection(device=device), model)
        assert (place.device, place.dtype, place.offload) == ("cuda", "bfloat16", offload)
        assert ("block by block from host memory: the weights take" in place.reason) == offload
    assert place.reads() == {"device": "cuda", "precision": "bfloat16"}
    never = choose_place(ComputeSection(offload="off"), model)
    assert (never.device, never.offload) == ("cpu" if offload else "cuda", False)


def test_the_cpu_is_taken_where_not_even_two_blocks_fit(gpu, tmp_path):
    gpu(free=int(1.25 * 1.5 * 2**20))
    place = choose_place(ComputeSection(), weights_of(tmp_path, 10))
    assert place.device == "cpu" and "two blocks and the other layers take" in place.reason


def test_files_that_are_damaged_are_left_to_whoever_loads_them(gpu, tmp_path):
    model = weights_of(tmp_path, 10)
    (tmp_path / "transformer/diffusion_pytorch_model.safetensors").write_bytes(b"x" * 2**23)
    gpu(free=2**22)
    assert choose_place(ComputeSection(), model).offload


def test_offloading_is_had_where_it_is_asked_for(gpu):
    gpu()
    place = choose_place(ComputeSection(offload="on"), SECTION)
    assert (
        place.offload
        and place.reason == "NVIDIA H100, in float16, block by block from host memory, as compute.offload is on"
    )


@pytest.mark.parametrize(
    ("having", "missing", "reason"),
    [({"architecture": None}, "", "no NVIDIA GPU"), ({}, "no accelerate", "no accelerate")],
)
def test_offloading_that_cannot_be_had_is_refused(gpu, monkeypatch, having, missing, reason):
    gpu(**having)
    monkeypatch.setattr(placement, "offloading_problem", lambda: missing)
    with pytest.raises(BackendUnavailable, match="with its weights offloaded") as error:
        choose_place(ComputeSection(offload="on"), SECTION)
    assert error.value.got == reason and "leave --offload out" in error.value.remedy


def test_without_its_packages_nothing_is_offloaded(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "offloading_problem", lambda: "no accelerate")
    gpu(free=2**22)
    assert choose_place(ComputeSection(), weights_of(tmp_path, 10)).device == "cpu"


def test_offloading_from_a_cpu_is_refused(gpu):
    gpu()
    with pytest.raises(UserError, match="the model computes on the CPU"):
        choose_place(ComputeSection(device="cpu", offload="on"), SECTION)


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
