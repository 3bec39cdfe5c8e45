"""The purpose of a model's tensors, by their shapes and places in the model, whatever their names.

Names only tell the nesting of modules, the numbered modules, and the tensor that is a layer's weight. A model is cut into units,
as a file may hold a denoiser, a VAE and text encoders:

| unit | has |
| --- | --- |
| a VAE | convolutions from three channels and to three, in two branches of several: the encoder and the decoder |
| a text encoder | a table without a bias, with many more rows than columns, outside of its blocks: the vocabulary |
| an image encoder | a convolution of patches of three channels, and blocks |
| a denoiser | blocks with attention, otherwise |

Blocks are numbered modules with several layers. In a block, attention is matrices beside each other: three of one shape, four
with two of one shape, or one with three times the rows that another has columns. An MLP is two matrices: each gives the
channels that the other reads, or twice as many with a gate. A modulation gives several times the block's width, or is a matrix
beside convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trtconvert.weights.sources import Source, StoredTensor

Unit = Literal["denoiser", "text encoder", "image encoder", "VAE encoder", "VAE decoder", "other"]
Kind = Literal[
    "attention",
    "spatial attention",
    "temporal attention",
    "MLP",
    "convolution",
    "modulation",
    "layer",
    "vocabulary",
    "outside of blocks",
    "vector or table",
]

COLOURS = 3
_SEVERAL = 3  # convolutions in a branch of a VAE, at least
_VOCABULARY = 4  # rows for each column of a vocabulary, at least
_FEWEST_WORDS = 256  # rows of a vocabulary, at least
_WIDER = 3  # channels that a denoiser reads, for each that it gives, at most: latents, those of an image, and a mask
_PATCH = 16  # pixels of an image encoder's patch, at least

Path = tuple[str, ...]


@dataclass(frozen=True)
class Role:
    """The purpose of a tensor: its unit, and its kind there."""

    unit: Unit
    kind: Kind

    def __str__(self) -> str:
        return f"{self.unit}, {self.kind}"


@dataclass(frozen=True)
class Structure:
    """The purposes of a model's tensors.

    Attributes:
        roles: by the tensors' paths.
        reads_images: whether a denoiser reads more channels than it gives, as those that turn images into videos (I2V).
    """

    roles: Mapping[str, Role]
    reads_images: bool

    def has(self, unit: Unit) -> bool:
        return any(role.unit == unit for role in self.roles.values())


@dataclass(frozen=True)
class _Weight:
    """A tensor: the path of its module, in parts, its shape, and whether a layer multiplies by it. Others are tables and
    vectors."""

    key: str
    module: Path
    shape: tuple[int, ...]
    is_layer: bool

    @property
    def is_matrix(self) -> bool:
        return self.is_layer and len(self.shape) == 2

    @property
    def is_conv(self) -> bool:
        return self.is_layer and len(self.shape) > 2


def structure_of(source: Source) -> Structure:
    """The purpose of each tensor of a model."""
    roles: dict[str, Role] = {}
    reads_images = False
    for part in source.parts:
        for unit in _units([_placed(tensor) for tensor in part.tensors]):
            found = _roles(unit)
            roles |= found
            reads_images |= _reads_images([weight for weight in unit if found[weight.key].unit == "denoiser"])
    return Structure(roles, reads_images)


def _placed(tensor: StoredTensor) -> _Weight:
    *module, name = tensor.name.split(".")
    return _Weight(tensor.path, tuple(module), tensor.shape, len(tensor.shape) > 1 and name == "weight")


# Units ------------------------------------------------------------------------------------------------------------------


def _units(weights: Sequence[_Weight]) -> list[list[_Weight]]:
    """The units of a file or folder: all of it, or its branches where one of them is a VAE or a whole text encoder."""
    root = len(_common([weight.module for weight in weights]))
    branches: dict[str, list[_Weight]] = defaultdict(list)
    for weight in weights:
        branches["".join(weight.module[root : root + 1])].append(weight)
    with_blocks = [name for name, branch in branches.items() if any(_attentions(branch))]
    whole = [name for name, branch in branches.items() if _vae(branch) or (_vocabulary(branch) and name in with_blocks)]
    if whole and set(with_blocks) - set(whole[:1] if len(whole) == 1 else ()):
        return list(branches.values())
    return [list(weights)]


def _common(paths: Iterable[Path]) -> Path:
    """The common beginning of paths."""
    equal = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in equal)


def _vae(weights: Sequence[_Weight]) -> tuple[Path, Path] | None:
    """The branches of a VAE's encoder and decoder."""
    convs = [weight for weight in weights if weight.is_conv]
    reading = [weight.module for weight in convs if weight.shape[1] == COLOURS]
    giving = [weight.module for weight in convs if weight.shape[0] == COLOURS]
    for first, last in itertools.product(reading, giving):
        depth = len(_common([first, last])) + 1
        branches = first[:depth], last[:depth]
        if all(sum(weight.module[:depth] == branch for weight in convs) >= _SEVERAL for branch in branches):
            return branches
    return None


def _vocabulary(weights: Sequence[_Weight]) -> list[_Weight]:
    blocks, alone = _blocks(weights), Counter(weight.module for weight in weights)
    return [
        weight
        for weight in weights
        if weight.is_matrix
        and alone[weight.module] == 1
        and weight.shape[0] >= max(_FEWEST_WORDS, _VOCABULARY * weight.shape[1])
        and _block_of(weight, blocks) is None
    ]


def _roles(weights: Sequence[_Weight]) -> dict[str, Role]:
    """The roles of a unit's tensors."""
    kinds = _kinds(weights)
    if (branches := _vae(weights)) is not None:
        encoder = branches[0]
        encoding = {weight.key for weight in weights if weight.module[: len(encoder)] == encoder}
        return {key: Role("VAE encoder" if key in encoding else "VAE decoder", kind) for key, kind in kinds.items()}
    unit: Unit = "other"
    if any(_attentions(weights)):
        patches = any(w.is_conv and w.shape[1] == COLOURS and math.prod(w.shape[2:]) >= _PATCH for w in weights)
        vocabulary = [weight.key for weight in _vocabulary(weights)]
        unit = "text encoder" if vocabulary else "image encoder" if patches else "denoiser"
        kinds |= dict.fromkeys(vocabulary, "vocabulary")
    return {weight.key: Role(unit, kinds[weight.key]) for weight in weights}


def _reads_images(weights: Sequence[_Weight]) -> bool:
    """Whether the first layers read more than the last layers give: channels of a latent, and pixels of a patch. No layer of
    the model reads the result."""
    blocks = _blocks(weights)
    ends = [weight for weight in weights if weight.is_layer and _block_of(weight, blocks) is None]
    convs = [weight for weight in ends if weight.is_conv]
    if len(convs) > 1:  # a U-Net
        return min(weight.shape[1] for weight in convs) > min(weight.shape[0] for weight in convs)
    width = _width(weights)
    first = [math.prod(weight.shape[1:]) for weight in ends if weight.shape[0] == width]
    read = {weight.shape[1] for weight in weights if weight.is_layer}
    last = [weight.shape[0] for weight in ends if weight.shape[1:] == (width,) and weight.shape[0] not in read]
    return bool(last) and any(min(last) < channels < _WIDER * min(last) for channels in first)


# Blocks -----------------------------------------------------------------------------------------------------------------


def _blocks(weights: Iterable[_Weight]) -> set[Path]:
    """The outermost numbered modules with several layers. A numbered layer is a member of a sequence."""
    inside: dict[Path, set[Path]] = defaultdict(set)
    for weight in weights:
        for depth, part in enumerate(weight.module, 1):
            if part.isdigit() and weight.is_layer:
                inside[weight.module[:depth]].add(weight.module)
                break
    return {block for block, modules in inside.items() if len(modules) > 1}


def _block_of(weight: _Weight, blocks: set[Path]) -> Path | None:
    return next(
        (weight.module[:depth] for depth in range(1, len(weight.module) + 1) if weight.module[:depth] in blocks), None
    )


def _width(weights: Sequence[_Weight]) -> int:
    """The columns of most matrices in blocks: the channels that pass from block to block."""
    blocks = _blocks(weights)
    sizes: dict[int, int] = defaultdict(int)
    for weight in weights:
        if weight.is_matrix and _block_of(weight, blocks) is not None:
            sizes[weight.shape[1]] += 1
    return max(sizes, key=lambda size: sizes[size], default=0)


def _parent(module: Path) -> Path:
    """The module of a layer, without numbers at the end: `to_out.0` is as good as `to_out`."""
    while module and module[-1].isdigit():
        module = module[:-1]
    return module[:-1]


def _groups(weights: Iterable[_Weight]) -> dict[Path, list[_Weight]]:
    """Weights of layers beside each other, by their common module."""
    groups: dict[Path, list[_Weight]] = defaultdict(list)
    for weight in weights:
        if weight.is_layer:
            groups[_parent(weight.module)].append(weight)
    return groups


def _attentions(weights: Sequence[_Weight]) -> dict[Path, list[_Weight]]:
    """The matrices of attention in blocks, by their common module."""
    blocks = _blocks(weights)
    found: dict[Path, list[_Weight]] = {}
    inside = [weight for weight in weights if _block_of(weight, blocks) is not None]
    for parent, group in _groups(inside).items():
        matrices = [weight for weight in group if weight.is_matrix]
        if any(weight.is_conv for weight in group):
            continue
        fused = any(
            a.shape[0] == 3 * b.shape[1] and a.shape[1] == b.shape[0] for a, b in itertools.permutations(matrices, 2)
        )
        alike = max(Counter(weight.shape for weight in matrices).values(), default=0)
        if fused or alike >= 3 or (len(matrices) >= 4 and alike >= 2):
            found[parent] = matrices
    return found


def _kinds(weights: Sequence[_Weight]) -> dict[str, Kind]:
    """The kind of each tensor of a unit."""
    blocks = _blocks(weights)
    kinds: dict[str, Kind] = {}
    within: dict[Path, list[_Weight]] = defaultdict(list)
    for weight in weights:
        block = _block_of(weight, blocks)
        kinds[weight.key] = (
            "vector or table" if not weight.is_layer else "outside of blocks" if block is None else "layer"
        )
        if block is not None and weight.is_layer:
            within[block].append(weight)
    attentions = _attentions(weights)
    for kind, matrices in _times_and_places(attentions):
        kinds |= {weight.key: kind for weight in matrices}
    for block in within.values():
        kinds |= _of_block([weight for weight in block if kinds[weight.key] == "layer"])
    return kinds


def _of_block(rest: Sequence[_Weight]) -> dict[str, Kind]:
    """The kinds of a block's layers outside of attention."""
    kinds: dict[str, Kind] = {weight.key: "convolution" for weight in rest if weight.is_conv}
    matrices = [weight for weight in rest if weight.is_matrix]
    beside_convs = {
        weight.key
        for group in _groups(rest).values()
        if any(weight.is_conv for weight in group)
        for weight in group
        if weight.is_matrix
    }
    kinds |= dict.fromkeys(beside_convs, "modulation")
    for up, down in itertools.permutations(matrices, 2):
        # Twice as many rows with a gate. A square matrix is a projection.
        fits = up.shape[1] == down.shape[0] and up.shape[0] in (down.shape[1], 2 * down.shape[1])
        if fits and down.shape[1] > down.shape[0] and up.key not in beside_convs:
            kinds |= {up.key: "MLP", down.key: "MLP"}
    width = min((weight.shape[0] for weight in rest if kinds.get(weight.key) == "MLP"), default=0)
    for weight in matrices:
        if weight.key not in kinds and width and weight.shape[0] % width == 0 and weight.shape[0] > width:
            kinds[weight.key] = "modulation"
    return kinds


def _times_and_places(attentions: Mapping[Path, list[_Weight]]) -> list[tuple[Kind, list[_Weight]]]:
    """Attention over frames and over places, told apart where a model has both: temporal attention reads tokens alone, and lies
    beside modules, numbered alike, whose attention also reads a text."""
    reads: dict[str, bool] = {}  # by the names of numbered modules: whether an attention in one reads another width
    beside: dict[str, set[str]] = defaultdict(set)
    holders: dict[Path, set[str]] = defaultdict(set)
    for parent, matrices in attentions.items():
        *above, name = _container(parent)
        reads[name] = reads.get(name, False) or len({weight.shape[1] for weight in matrices}) > 1
        holders[tuple(above)].add(name)
    for names in holders.values():
        for name in names:
            beside[name] |= names - {name}
    found: list[tuple[Kind, list[_Weight]]] = []
    for parent, matrices in attentions.items():
        name = _container(parent)[-1]
        others = [reads[other] for other in beside[name]]
        kind: Kind = "attention"
        if not reads[name] and any(others):
            kind = "temporal attention"
        elif reads[name] and not all(others):
            kind = "spatial attention"
        found.append((kind, matrices))
    return found


def _container(parent: Path) -> Path:
    """The numbered module within a block that an attention is in, or else the block."""
    numbers = [depth for depth, part in enumerate(parent) if part.isdigit()]
    return parent[: numbers[1] if len(numbers) > 1 else numbers[0]]
