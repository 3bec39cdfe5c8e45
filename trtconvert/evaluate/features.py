"""Feature extractors: map images to the vectors that compare sets of samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.calib.identity import EXTRACTOR, SHIPPED_CLASSIFIERS, classifier_weights
from trtconvert.convolutions import cudnn_convolutions
from trtconvert.entry_point import function_identity, import_function
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line
from trtconvert.evaluate.optional import require
from trtconvert.files import sha256
from trtconvert.models.denoiser import require_device
from trtconvert.weights.weight_files import read_tensors

SPATIAL_CHANNELS = 7
"""Channels of the feature map of sFID, as its authors chose."""


@dataclass(frozen=True)
class Features:
    """Features of a batch of images.

    Attributes:
        pooled: [N, D], for FID, KID, precision and recall.
        logits: [N, classes] for the inception score, or None.
        spatial: [N, S], a flattened feature map for sFID, or None.
    """

    pooled: Tensor
    logits: Tensor | None = None
    spatial: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in self.tensors().items():
            if tensor.dim() != 2:
                raise UserError(
                    f"the extractor's {name} features do not fit",
                    expected="[samples, features]",
                    got=str(list(tensor.shape)),
                    remedy="flatten or pool the features in the extractor",
                )

    def tensors(self) -> dict[str, Tensor]:
        """Returns the features that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class Extractor:
    """A feature extractor.

    Attributes:
        name: as requested.
        identity: hash of the weights, or of the name and the code, and the device. Features on disk are filed under it.
        extract: [N, C, H, W] in [0, 1] → `Features`.
        device: of the images that `extract` takes.
    """

    name: str
    identity: str
    extract: Callable[[Tensor], Features]
    device: str = "cpu"

    def __call__(self, images: Tensor) -> Features:
        """Returns features on the CPU.

        Raises:
            UserError: the extractor fails on the images.
        """
        try:
            # TF32 would give other features than the CPU.
            exact = cudnn_convolutions(tf32=False, deterministic=True)
            with torch.no_grad(), nullcontext() if self.device == "cpu" else exact:
                found = self.extract(images.to(self.device))
            return Features(**{name: tensor.cpu() for name, tensor in found.tensors().items()})
        except TrtconvertError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"the feature extractor '{self.name}' fails on the images",
                expected="images with the channels and the size of the extractor",
                got=f"{list(images.shape[1:])}, {kind_and_first_line(error)}",
                remedy="choose another with --features, or plan.features in the recipe; --debug shows where it failed",
            ) from error


def load_extractor(name: str, weights: Path | None = None, device: str = "cpu") -> Extractor:
    """Loads a feature extractor.

    Args:
        name: "digits-classifier", "emoji-classifier", "inception", or "package.module:function". Such a function takes
            images [N, C, H, W] in [0, 1] and returns pooled features [N, D], or `Features`.
        weights: of the extractor; shipped classifiers have their own.
        device: "cpu" or "cuda"; a function always gets images on the CPU.
    Raises:
        UserError: there is no such extractor, or its weights are missing or do not fit.
        BackendUnavailable: torch sees no such device.
    """
    require_device(device)
    if name in SHIPPED_CLASSIFIERS:
        path = weights or classifier_weights(name)
        extract = {"digits-classifier": _digits, "emoji-classifier": _emoji}[name](path, device)
        return Extractor(name, _on(device, sha256(path)), extract, device)
    if name == "inception":
        return _inception(weights, device)
    if ":" in name:
        return _from_function(name, weights)
    raise UserError(
        f"there is no feature extractor '{name}'",
        expected=f"{', '.join(SHIPPED_CLASSIFIERS)}, inception, or package.module:function",
        got=name,
        remedy="correct --features, or plan.features in the recipe",
    )


def _on(device: str, identity: str) -> str:
    return identity if device == "cpu" else f"{identity} on {device}"


def load_state(path: Path, what: str) -> Mapping[str, Tensor]:
    """Reads the tensors of a file of weights, without executing code of the file.

    Args:
        what: description of the expected file.
    Raises:
        UserError: the file is missing or damaged, or holds something else.
    """
    try:
        return read_tensors([path])
    except UserError as error:
        raise UserError(
            f"cannot read the weights {path}",
            expected=what,
            got=error.got,
            remedy="download the file and give its path; nothing is downloaded silently",
        ) from error


def _digits(path: Path, device: str) -> Callable[[Tensor], Features]:
    from trtconvert.evaluate.classifier import load_digits_classifier

    classifier = load_digits_classifier(path).to(device)
    convolutions = classifier.body[:5]

    def extract(images: Tensor) -> Features:
        spatial = convolutions(images)[:, :SPATIAL_CHANNELS]  # [N, 7, 4, 4]
        pooled = classifier.features(images)
        return Features(pooled, classifier.head(pooled), spatial.flatten(1))

    return extract


def _emoji(path: Path, device: str) -> Callable[[Tensor], Features]:
    from trtconvert.evaluate.emoji import load_emoji_classifier

    classifier = load_emoji_classifier(path).to(device)

    def extract(images: Tensor) -> Features:
        maps = classifier.maps(images)
        pooled = maps.mean((2, 3))
        return Features(pooled, classifier.head(pooled), maps[:, :SPATIAL_CHANNELS].flatten(1))

    return extract


def _inception(weights: Path | None, device: str) -> Extractor:
    """Returns torch-fidelity's InceptionV3, with the outputs of FID, IS and sFID."""
    what = "torch-fidelity's InceptionV3 weights (pt_inception or weights-inception-2015-12-05-6726825d.pth)"
    if weights is None:
        raise UserError(
            "the inception features need weights",
            expected=what,
            got="none",
            remedy="download the file, and give its path with --features-weights, or as plan.features_weights in the recipe",
        )
    module = require("torch_fidelity.feature_extractor_inceptionv3", "torch-fidelity")
    state = load_state(weights, what)
    with tempfile.TemporaryDirectory() as folder:
        # The class unpickles its file without checks, so it gets a file written here.
        safe = Path(folder) / "inception.pth"
        torch.save(dict(state), safe)
        try:
            network = module.FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=safe
            )
        except RuntimeError as error:
            raise UserError(
                f"{weights} does not fit InceptionV3",
                expected=what,
                got=str(error).splitlines()[-1].strip(),
                remedy="take the file that torch-fidelity uses",
            ) from error
    network = network.to(device)
    maps: list[Tensor] = []
    # Nash et al. 2021 (arXiv 2103.03841) take the first channels of "mixed_6/conv", the first branch here.
    network.Mixed_6d.register_forward_hook(lambda *call: maps.append(call[2][:, :SPATIAL_CHANNELS].flatten(1)))

    def extract(images: Tensor) -> Features:
        maps.clear()
        pooled, logits = network((images.expand(-1, 3, -1, -1) * 255).round().byte())
        return Features(pooled, logits, maps[0])

    return Extractor("inception", _on(device, sha256(weights)), extract, device)


def _from_function(name: str, weights: Path | None) -> Extractor:
    extract = import_function(name, EXTRACTOR)
    if weights is not None:
        raise UserError(
            f"the feature extractor '{name}' loads its own weights",
            expected="no weights beside the function",
            got=str(weights),
            remedy="leave --features-weights out, or plan.features_weights in the recipe",
        )

    def checked(images: Tensor) -> Features:
        seen = extract(images)
        if isinstance(seen, Tensor):
            seen = Features(seen)
        shapes = [list(x.shape) for x in seen.tensors().values()] if isinstance(seen, Features) else []
        if not shapes or any(shape[0] != len(images) for shape in shapes):
            raise UserError(
                f"the feature extractor '{name}' returns the wrong type or size",
                expected=f"a tensor [{len(images)}, features] or trtconvert.evaluate.features.Features",
                got=", ".join(map(str, shapes)) or type(seen).__name__,
                remedy="correct the function",
            )
        return seen

    return Extractor(name, function_identity(name, extract), checked)
