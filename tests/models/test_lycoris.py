"""LoHa, LoKr and DoRA, merged into models: against their definitions element by element, and against peft's own modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny_loras
import torch
from merged_loras import ATTENTION, UNET, assert_close, fresh, merged
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trtconvert.errors import UserError

RANK, ALPHA = 3, 1.5
CONV = "down_blocks.0.resnets.0.conv1"
NAMES = [*UNET, CONV]
"""Linear layers, a convolution of one pixel, and one of 3 × 3."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.3


def tucker(kernel: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """kernel [R, R, …], a [R, O], b [R, I] → [O, I, …], by the sum that defines it."""
    kernel, a, b = kernel.double(), a.double(), b.double()
    return sum(
        a[i][:, None].mul(b[j])[(..., *[None] * (kernel.dim() - 2))] * kernel[i, j]
        for i in range(len(kernel))
        for j in range(kernel.shape[1])
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices as a sum of outer products."""
    return sum(a.double()[:, r, None] * b.double()[r] for r in range(len(b)))


# LoHa -------------------------------------------------------------------------------------------------------------------


def loha(shape: torch.Size, with_kernel: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a layer, and the difference before alpha / rank."""
    rows, columns, *kernel = shape
    if with_kernel and kernel:
        tensors = {
            f"hada_{name}": x
            for side in "12"
            for name, x in (
                (f"w{side}_a", drawn(RANK, rows)),
                (f"w{side}_b", drawn(RANK, columns)),
                (f"t{side}", drawn(RANK, RANK, *kernel)),
            )
        }
        sides = [tucker(*(tensors[f"hada_{name}"] for name in (f"t{s}", f"w{s}_a", f"w{s}_b"))) for s in "12"]
    else:
        columns = shape[1:].numel()
        tensors = {
            f"hada_w{side}_{end}": drawn(*sizes)
            for side in "12"
            for end, sizes in (("a", (rows, RANK)), ("b", (RANK, columns)))
        }
        sides = [product(tensors[f"hada_w{s}_a"], tensors[f"hada_w{s}_b"]) for s in "12"]
    return tensors, (sides[0] * sides[1]).reshape(shape)


# LoKr -------------------------------------------------------------------------------------------------------------------


def kronecker(first: Tensor, second: Tensor) -> Tensor:
    """Block i, j of the result is the second, multiplied by element i, j of the first."""
    first, second = first.double(), second.double()
    return torch.cat([torch.cat([x * second for x in row], 1) for row in first])


def lokr(shape: torch.Size, first: str, second: str) -> tuple[dict[str, Tensor], Tensor]:
    """
    Args:
        first, second: "whole", "product", or "kernel" of convolutions.
    """
    rows, columns, *kernel = shape
    small, (large_rows, large_columns) = (4, 2), (rows // 4, columns // 2)
    tensors: dict[str, Tensor] = {}
    if first == "whole":
        tensors["lokr_w1"] = one = drawn(*small)
    else:
        tensors |= {"lokr_w1_a": drawn(4, RANK), "lokr_w1_b": drawn(RANK, 2)}
        one = product(tensors["lokr_w1_a"], tensors["lokr_w1_b"])
    if second == "whole":
        tensors["lokr_w2"] = two = drawn(large_rows, large_columns, *kernel)
    elif second == "kernel" and kernel:
        tensors |= {"lokr_w2_a": drawn(RANK, large_rows), "lokr_w2_b": drawn(RANK, large_columns)}
        tensors["lokr_t2"] = drawn(RANK, RANK, *kernel)
        two = tucker(tensors["lokr_t2"], tensors["lokr_w2_a"], tensors["lokr_w2_b"])
    else:
        of_kernel = torch.Size(kernel).numel()
        tensors |= {"lokr_w2_a": drawn(large_rows, RANK), "lokr_w2_b": drawn(RANK, large_columns * of_kernel)}
        two = product(tensors["lokr_w2_a"], tensors["lokr_w2_b"]).reshape(large_rows, large_columns, *kernel)
    return tensors, kronecker(one, two)


LAYERS = {
    "LoHa": lambda shape: loha(shape, False),
    "LoHa with kernels": lambda shape: loha(shape, True),
    **{
        f"LoKr, {first} and {second}": lambda shape, first=first, second=second: lokr(shape, first, second)
        for first in ("whole", "product")
        for second in ("whole", "product", "kernel")
    },
}

LAYOUTS = {
    "lycoris": lambda name: f"lycoris_{name.replace('.', '_')}",
    "kohya": lambda name: f"lora_unet_{name.replace('.', '_')}",
    "diffusers": lambda name: f"unet.{name}",
    "alone": lambda name: name,
}


def written(path: Path, layers: Mapping[str, dict[str, Tensor]]) -> Path:
    save_file({f"{name}.{part}": x for name, parts in layers.items() for part, x in parts.items()}, path)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_unet_is_the_one_merged_by_the_definition(tmp_path, kind, layout):
    torch.manual_seed(0)
    module = fresh("stable_diffusion")
    layers, deltas = {}, {}
    for name in NAMES:
        tensors, delta = LAYERS[kind](module.get_parameter(f"{name}.weight").shape)
        layers[LAYOUTS[layout](name)] = tensors | {"alpha": torch.tensor(ALPHA)}
        # Alpha counts where there is a rank.
        deltas[name] = delta * (1 if kind == "LoKr, whole and whole" else ALPHA / RANK)
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, 0.7)
    file = written(tmp_path / "lora.safetensors", layers)
    assert_close(merged(module, {"file": file, "scale": 0.7}, root="unet"), expected)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr, whole and product"])
def test_without_an_alpha_it_is_the_rank(tmp_path, kind):
    torch.manual_seed(0)
    module = fresh("stable_diffusion")
    tensors, delta = LAYERS[kind](module.get_parameter(f"{UNET[0]}.weight").shape)
    expected = tiny_loras.with_deltas(module.state_dict(), {UNET[0]: delta}, 1.0)
    assert_close(merged(module, {"file": written(tmp_path / "a.safetensors", {UNET[0]: tensors})}), expected)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr, whole and whole", "LoKr, product and product"])
def test_rows_of_a_joint_layer_go_to_its_modules(tmp_path, kind):
    """Flux's original code has one layer for queries, keys and values, and the blocks of a LoKr end within them."""
    torch.manual_seed(0)
    module = fresh("flux")
    names = [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    weights = [module.get_parameter(f"{name}.weight") for name in names]
    tensors, delta = LAYERS[kind](torch.cat(weights).shape)
    rows = delta.split([len(weight) for weight in weights])
    expected = tiny_loras.with_deltas(module.state_dict(), dict(zip(names, rows, strict=True)), 1.0)
    file = written(tmp_path / "a.safetensors", {"diffusion_model.double_blocks.0.img_attn.qkv": tensors})
    assert_close(merged(module, {"file": file}), expected)


def test_halves_that_change_places_do_so_for_a_lokr(tmp_path):
    torch.manual_seed(0)
    module = fresh("flux")
    tensors, delta = lokr(module.norm_out.linear.weight.shape, "whole", "product")
    shift, scale = delta.chunk(2)
    expected = tiny_loras.with_deltas(module.state_dict(), {"norm_out.linear": torch.cat([scale, shift])}, 1.0)
    file = written(tmp_path / "a.safetensors", {"lora_unet_final_layer_adaLN_modulation_1": tensors})
    assert_close(merged(module, {"file": file}), expected)


def test_differences_of_norms_are_added(tmp_path):
    module = fresh("stable_diffusion")
    norm = "mid_block.resnets.0.norm1"
    before = {name: x.clone() for name, x in module.state_dict().items()}
    tensors = {name: drawn(len(module.get_parameter(f"{norm}.weight"))) for name in ("w_norm", "b_norm")}
    file = written(tmp_path / "a.safetensors", {f"lora_unet_{norm.replace('.', '_')}": tensors})
    after = merged(module, {"file": file, "scale": 0.5})
    for suffix, difference in zip(("weight", "bias"), tensors.values(), strict=True):
        torch.testing.assert_close(after[f"{norm}.{suffix}"], before[f"{norm}.{suffix}"] + 0.5 * difference)


# DoRA -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_rows_or_columns_get_the_lengths_of_dora(tmp_path, of):
    """At a scale below 1 the lengths change by a share, as lycoris does."""
    torch.manual_seed(0)
    module, layers, expected = fresh("stable_diffusion"), {}, {}
    axis = 0 if of == "rows" else 1
    for name in NAMES:
        weight = module.get_parameter(f"{name}.weight")
        tensors, delta = loha(weight.shape, False)
        shape = [1] * weight.dim()
        shape[axis] = weight.shape[axis]
        lengths = drawn(*shape).abs() + 0.5
        layers[LAYOUTS["kohya"](name)] = tensors | {"dora_scale": lengths, "alpha": torch.tensor(ALPHA)}
        made = weight.double() + 0.7 * ALPHA / RANK * delta
        for vector, length in zip(made.unbind(axis), lengths.flatten().tolist(), strict=True):
            vector.mul_(1 + 0.7 * (length / float(vector.norm()) - 1))
        expected[f"{name}.weight"] = made.float()
    expected = module.state_dict() | expected
    assert_close(merged(module, {"file": written(tmp_path / "a.safetensors", layers), "scale": 0.7}), expected)


def test_lengths_of_rows_go_to_the_modules_of_a_joint_layer(tmp_path):
    torch.manual_seed(0)
    module = fresh("flux")
    names = [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    joint = torch.cat([module.get_parameter(f"{name}.weight") for name in names])
    tensors, delta = loha(joint.shape, False)
    name, lengths = "diffusion_model.double_blocks.0.img_attn.qkv", drawn(len(joint), 1).abs()
    file = written(tmp_path / "a.safetensors", {name: tensors | {"dora_scale": lengths}})
    made = joint.double() + delta
    rows = (made * lengths / made.norm(dim=1, keepdim=True)).float().chunk(3)
    expected = {f"{name}.weight": of for name, of in zip(names, rows, strict=True)}
    expected = module.state_dict() | expected
    assert_close(merged(module, {"file": file}), expected)
    columns = drawn(1, joint.shape[1]).abs()
    file = written(tmp_path / "b.safetensors", {name: tensors | {"dora_scale": columns}})
    with pytest.raises(UserError, match=r"does not fit[^\0]*lengths of columns, by DoRA, of 3 weights in one"):
        merged(fresh("flux"), {"file": file})


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_rows_of_zeros_stay_zeros_whatever_their_length_by_dora(tmp_path, name):
    """Such a row has no direction; one of 1e-25 has squares of zero."""
    module = Base().requires_grad_(False)
    weight = module.get_parameter(f"{name}.weight")
    weight[0], weight[1] = 0.0, 1e-25
    tensors, delta = loha(weight.shape, False)
    tensors["hada_w1_a"][:2] = 0.0
    rows = weight.double() + delta * (torch.arange(len(weight)) > 1).view(-1, *[1] * (weight.dim() - 1))
    expected = 5 * rows / rows.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1)).clamp_min(1e-6)
    lengths = torch.full((len(weight), *[1] * (weight.dim() - 1)), 5.0)
    file = written(tmp_path / "a.safetensors", {f"lycoris_{name}": tensors | {"dora_scale": lengths}})
    after = merged(module, {"file": file})[f"{name}.weight"]
    torch.testing.assert_close(after, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 24), (24, 1), (1, 4, 3, 3), (4, 1, 3, 3)])
@pytest.mark.parametrize("axis", [0, 1])
def test_one_row_or_one_column_gets_its_length_by_dora(tmp_path, shape, axis):
    """[1, 1] is the length of a row for one row, and of a column for one column."""
    module = nn.ModuleDict({"layer": nn.Conv2d(shape[1], shape[0], 3) if shape[2:] else nn.Linear(shape[1], shape[0])})
    module.requires_grad_(False)
    tensors, delta = loha(torch.Size(shape), False)
    made = module.get_parameter("layer.weight").double() + delta
    lengths = drawn(*(size if at == axis else 1 for at, size in enumerate(shape))).abs() + 0.5
    others = [at for at in range(len(shape)) if at != axis]
    expected = made * lengths / torch.linalg.vector_norm(made, dim=others, keepdim=True)
    file = written(tmp_path / "a.safetensors", {"lycoris_layer": tensors | {"dora_scale": lengths}})
    torch.testing.assert_close(merged(module, {"file": file})["layer.weight"], expected.float())


def test_a_dora_gives_its_lengths_to_the_sum_with_the_files_before(tmp_path):
    module = Base().requires_grad_(False)
    before, files, deltas = module.linear.weight.double(), [], []
    lengths = drawn(36, 1).abs() + 0.5
    for further in ({}, {"dora_scale": lengths}):
        tensors, delta = loha(before.shape, False)
        files.append({"file": written(tmp_path / f"{len(files)}.safetensors", {"lycoris_linear": tensors | further})})
        deltas.append(delta)
    made = before + sum(deltas)
    last = made * lengths / made.norm(dim=1, keepdim=True)
    state = {name: x.clone() for name, x in module.state_dict().items()}
    torch.testing.assert_close(merged(module, *files)["linear.weight"], last.float())
    module.load_state_dict(state)
    made = before + deltas[1]
    first = made * lengths / made.norm(dim=1, keepdim=True) + deltas[0]
    torch.testing.assert_close(merged(module, *files[::-1])["linear.weight"], first.float())


@pytest.mark.parametrize("place", ["beside", "within"])
def test_dora_of_peft_is_merged_as_peft_does(tmp_path, place):
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    base = Base().eval().requires_grad_(False)
    state = {name: x.clone() for name, x in base.state_dict().items()}
    names = ["linear", "few", "conv", "pixel"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=names, init_lora_weights=False, use_dora=True)
    adapted = peft.get_peft_model(base, config)
    for name, x in adapted.named_parameters():
        if "magnitude" in name:
            x.data.mul_(1 + 0.3 * torch.rand_like(x))
    adapted.save_pretrained(tmp_path)
    expected = adapted.merge_and_unload().state_dict()
    file = settled(tmp_path, place)
    module = Base().eval().requires_grad_(False)
    module.load_state_dict(state)
    assert_close(merged(module, {"file": file}), expected)
    tensors = {name: x for name, x in load_file(file).items() if "linear.lora_magnitude" not in name}
    with safe_open(file, framework="pt") as opened:
        save_file(tensors, file, opened.metadata())
    with pytest.raises(UserError, match=r"(?s)not whole.*lora_magnitude_vector of .*linear, as its settings have use"):
        merged(Base().requires_grad_(False), {"file": file})


# peft -------------------------------------------------------------------------------------------------------------------


class Base(nn.Module):
    """A layer of each kind that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 36)
        self.few = nn.Linear(8, 8)
        self.conv = nn.Conv2d(16, 32, 3)
        self.pixel = nn.Conv2d(16, 32, 1)
        self.sound = nn.Conv1d(16, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def settled(folder: Path, place: str) -> Path:
    """Returns a file that peft saved in a folder, with its settings beside it, or within as diffusers writes them."""
    file = folder / "adapter_model.safetensors"
    if place == "beside":
        return file
    tensors = {name.replace("base_model.model.", "transformer."): x for name, x in load_file(file).items()}
    settings = json.loads((folder / "adapter_config.json").read_text())
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": x for name, x in settings.items()})}
    save_file(tensors, folder / "again.safetensors", metadata)
    return folder / "again.safetensors"


SETTINGS = {
    "plain": {},
    "kernels": {"use_effective_conv2d": True},
    "patterns": {"rank_pattern": {"linear": 2, "few": 6}, "alpha_pattern": {"linear": 7, "few": 5}},
}


@pytest.mark.parametrize("place", ["beside", "within"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "LoKrConfig of products", "LoKrConfig of large blocks"])
def test_files_of_peft_are_merged_as_peft_does(tmp_path, kind, settings, place):
    """Of whole matrices too, which peft multiplies by alpha / rank. Names and settings as peft and diffusers write them."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    base = Base().eval().requires_grad_(False)
    state = {name: x.clone() for name, x in base.state_dict().items()}
    options = {
        "LoKrConfig of products": {"decompose_both": True, "decompose_factor": 8},
        "LoKrConfig of large blocks": {"decompose_factor": 2},
    }.get(kind, {})
    names = ["linear", "few", "conv", "pixel"]
    if kind != "LoKrConfig of products":  # see the test below
        names.append("sound")
    config = getattr(peft, kind.partition(" ")[0])(
        r=3, alpha=5, target_modules=names, init_weights=False, **options, **SETTINGS[settings]
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path)
    expected = adapted.merge_and_unload().state_dict()
    module = Base().eval().requires_grad_(False)
    module.load_state_dict(state)
    after = merged(module, {"file": settled(tmp_path, place)})
    assert all(not torch.equal(after[f"{name}.weight"], state[f"{name}.weight"]) for name in names)
    assert_close(after, expected)


@pytest.mark.parametrize("place", ["beside", "within"])
def test_biases_of_peft_are_added_at_the_scale_of_the_weights(tmp_path, place):
    """As in the control LoRAs of Flux."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    base, module = Base().requires_grad_(False), Base().requires_grad_(False)
    module.load_state_dict(base.state_dict())
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["linear", "conv"], init_lora_weights=False, lora_bias=True
    )
    adapted = peft.get_peft_model(base, config)
    for name, x in adapted.named_parameters():
        if name.endswith("lora_B.default.bias"):
            nn.init.normal_(x)
    adapted.save_pretrained(tmp_path)
    expected = adapted.merge_and_unload().state_dict()
    assert not torch.equal(expected["linear.bias"], module.linear.bias)
    assert_close(merged(module, {"file": settled(tmp_path, place)}), expected)


def adapted_by_peft(folder: Path, **options: object) -> dict[str, Tensor]:
    """Saves a LoRA before and after a training, in the folders "before" and "after", and the first one's conversion in
    "converted". Returns the merged weights."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["linear", "few"], **options)
    adapted = peft.get_peft_model(Base().requires_grad_(False), config)
    adapted.save_pretrained(folder / "before")
    for name, x in adapted.named_parameters():
        if "lora_" in name:
            x.data += 0.1 * torch.randn_like(x)
    adapted.save_pretrained(folder / "after")
    if options:
        adapted.save_pretrained(folder / "converted", path_initial_model_for_weight_conversion=str(folder / "before"))
    return adapted.merge_and_unload().state_dict()


def seeded() -> Base:
    """Returns the model that `adapted_by_peft` adapts."""
    torch.manual_seed(0)
    return Base().eval().requires_grad_(False)


@pytest.mark.parametrize(("initialisation", "by_peft"), [("pissa", True), ("olora", True), ("pissa_niter_4", False)])
def test_a_lora_of_changed_weights_is_refused_and_the_remedies_work(tmp_path, initialisation, by_peft):
    """PiSSA and OLoRA subtract the LoRA that they begin with from the weights of the model."""
    expected = adapted_by_peft(tmp_path, init_lora_weights=initialisation)
    remedy = "merge_and_unload" if by_peft else "path_initial_model_for_weight_conversion"
    with pytest.raises(UserError, match=rf"(?s)other weights.*'{initialisation}'.*remedy: .*{remedy}"):
        merged(seeded(), {"file": tmp_path / "after" / "adapter_model.safetensors"})
    if by_peft:
        import peft

        loaded = peft.PeftModel.from_pretrained(seeded(), tmp_path / "after").merge_and_unload()
        assert_close(loaded.state_dict(), expected)
    assert_close(merged(seeded(), {"file": tmp_path / "converted" / "adapter_model.safetensors"}), expected)


@pytest.mark.parametrize(
    "option", ["fan_in_fan_out", "use_qalora", "alora_invocation_tokens", "layer_replication", "target_parameters"]
)
def test_what_peft_computes_beside_a_lora_is_refused(tmp_path, option):
    adapted_by_peft(tmp_path)
    config = tmp_path / "after" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {option: [1]}))
    with pytest.raises(UserError, match=rf"(?s)cannot be merged.*got: {option} in.*remedy: "):
        merged(seeded(), {"file": tmp_path / "after" / "adapter_model.safetensors"})


def test_settings_beside_a_file_of_another_program_are_in_doubt_and_the_remedies_work(tmp_path):
    """peft would follow them, and diffusers does not read them."""
    expected = adapted_by_peft(tmp_path)
    tensors = load_file(tmp_path / "after" / "adapter_model.safetensors")
    file, config = tmp_path / "lora.safetensors", tmp_path / "adapter_config.json"
    save_file({name.replace("base_model.model.", "transformer."): x for name, x in tensors.items()}, file)
    (tmp_path / "after" / "adapter_config.json").rename(config)
    with pytest.raises(UserError, match=r"(?s)in doubt.*alpha of 5 for transformer\..* of rank 3.*remedy: write it"):
        merged(seeded(), {"file": file})
    save_file(load_file(file), tmp_path / "new.safetensors", {"lora_adapter_metadata": config.read_text()})
    assert_close(merged(seeded(), {"file": tmp_path / "new.safetensors"}), expected)
    config.rename(tmp_path / "elsewhere.json")
    before, after = seeded().state_dict(), merged(seeded(), {"file": file})
    change = expected["linear.weight"] - before["linear.weight"]
    torch.testing.assert_close(after["linear.weight"] - before["linear.weight"], change * 3 / 5)


@pytest.mark.parametrize("place", ["beside", "within"])
def test_blocks_of_a_one_dimensional_convolution_are_left_to_peft(tmp_path, place):
    """peft's formula for them is no Kronecker product, that of lycoris is."""
    tensors, delta = lokr(torch.Size((32, 16, 3)), "whole", "whole")
    name, metadata = "base_model.model.sound", None
    if place == "beside":
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "alpha": 8, "r": 8}))
    else:
        name, metadata = "unet.sound", {"lora_adapter_metadata": json.dumps({"unet.alpha": 8, "unet.r": 8})}
    save_file({f"{name}.{part}": x for part, x in tensors.items()}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(UserError, match=r"(?s)cannot be merged.*got: .*sound.*remedy: merge it with peft"):
        merged(Base().requires_grad_(False), {"file": tmp_path / "a.safetensors"})
    module = Base().requires_grad_(False)
    expected = tiny_loras.with_deltas(module.state_dict(), {"sound": delta}, 1.0)
    file = written(tmp_path / "b.safetensors", {"lycoris_sound": tensors})
    assert_close(merged(module, {"file": file}), expected)


# Refusals ---------------------------------------------------------------------------------------------------------------


def changed(tensors: dict[str, Tensor], **others: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in (tensors | others).items() if x is not None}


DAMAGES = {
    "half of a LoHa": (
        lambda shape: changed(loha(shape, False)[0], hada_w2_b=None),
        "not whole.*expected: hada_w2_b of",
    ),
    "one kernel of two": (lambda shape: changed(loha(shape, False)[0], hada_t1=drawn(3, 3)), "expected: hada_t2 of"),
    "a LoKr without its second": (lambda shape: {"lokr_w1": drawn(4, 2)}, "expected: lokr_w2_a and lokr_w2_b of"),
    "two kinds": (
        lambda shape: loha(shape, False)[0] | lokr(shape, "whole", "whole")[0],
        r"twice.*got: .*hada_w\d_[ab] and .*lokr_w\d",
    ),
    "another width": (
        lambda shape: lokr(torch.Size((shape[0], 48)), "whole", "whole")[0],
        r"does not fit.*lokr_w1 \[4, 2\], lokr_w2 \[8, 24\] for a weight of \[32, 32\]",
    ),
    "ranks that differ": (
        lambda shape: changed(loha(shape, False)[0], hada_w1_b=drawn(2, shape[1])),
        r"does not fit.*hada_w1_b \[2, 32\]",
    ),
    "lengths alone": (lambda shape: {"dora_scale": drawn(32, 1)}, "not whole.*expected: down and up of"),
    "lengths of another weight": (
        lambda shape: changed(lokr(shape, "whole", "whole")[0], dora_scale=drawn(31, 1)),
        r"does not fit.*dora \[31, 1\] for a weight of \[32, 32\]",
    ),
    "a kernel that lycoris never uses": (
        lambda shape: changed(lokr(shape, "whole", "whole")[0], lokr_t1=drawn(3, 3)),
        "cannot be merged.*lokr_t1",
    ),
    "NaN": (
        lambda shape: changed(loha(shape, False)[0], hada_w1_a=torch.full((32, 3), torch.nan)),
        "NaN or Inf in .*w1_a",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unmergeable_file_is_refused_with_its_fault(tmp_path, damage):
    make, message = DAMAGES[damage]
    module = fresh("stable_diffusion")
    name = ATTENTION[0]
    tensors = make(module.get_parameter(f"{name}.weight").shape)
    with pytest.raises(UserError, match=rf"(?s){message}.*remedy: "):
        merged(module, {"file": written(tmp_path / "a.safetensors", {f"unet.{name}": tensors})})
