"""Metrics of samples. Statistics of shards are merged in float64, in the order of the shards.

Sets are compared by features [N, D] of any extractor. The distances are those of torch-fidelity, which are checked against
the original TensorFlow code; this module streams the moments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.evaluate.features import load_state
from trtconvert.evaluate.optional import require

if TYPE_CHECKING:
    from lpips import LPIPS

NEIGHBOURS = 3
"""k of the nearest-neighbour balls of precision and recall, as in the paper."""

KID_SUBSET = 1000
"""Samples per subset of the kernel distance, at most the smaller set, as in the paper."""

_ROWS = 1024
"""Samples whose distances to all others are in memory at once."""

_ROUNDING = 1e-12
"""Squared distances below this share of the squared length are 0: FP32 features of one image differ by less."""

SSIM_SIGMA, SSIM_SIGMA_SMALL = 1.5, 0.5
"""Standard deviations in pixels of SSIM's window: the paper's (11 pixels wide), and one for images under 16 pixels (5 wide)."""

SSIM_SMALLEST = 5
"""Pixels of the smaller window: smaller images have no SSIM."""

LPIPS_SIDE = 64
"""Smaller images are enlarged to this side: AlexNet's strides would reduce them to nothing."""


@dataclass(frozen=True)
class Moments:
    """Mean and scatter of a set of features.

    Attributes:
        count: N.
        mean: [D] float64.
        scatter: [D, D] float64, the sum of outer products of deviations from the mean.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @staticmethod
    def of(features: Tensor) -> Moments:
        """Returns the moments of features [N, D], N at least 1."""
        features = features.double()
        mean = features.mean(0)
        deviation = features - mean
        return Moments(len(features), mean, deviation.T @ deviation)

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both sets together (Chan, Golub and LeVeque 1979, equation 2.1, for matrices)."""
        count = self.count + other.count
        step = other.mean - self.mean
        scatter = self.scatter + other.scatter + step.outer(step) * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), scatter)

    def covariance(self) -> Tensor:
        """Returns [D, D] with denominator N - 1, as in FID."""
        return self.scatter / (self.count - 1)


def merged(moments: Iterable[Moments]) -> Moments:
    """Merges all sets from the first to the last: the same order gives the same bits."""
    rest = iter(moments)
    total = next(rest)
    for one in rest:
        total = total.merge(one)
    return total


def frechet_distance(one: Moments, other: Moments) -> float:
    """Returns FID of pooled features, or sFID of spatial ones (Heusel et al. 2017, arXiv 1706.08500, equation 6)."""
    fid = _fidelity("metric_fid")
    statistics = [{"mu": m.mean.numpy(), "sigma": m.covariance().numpy()} for m in (one, other)]
    return fid.fid_statistics_to_metric(*statistics, verbose=False)[fid.KEY_METRIC_FID]


def kernel_distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Returns KID (Bińkowski et al. 2018, arXiv 1801.01401, section 4). KID is unbiased and may be negative.

    Args:
        one, other: features [N, D] and [M, D].
    Returns:
        Mean and standard deviation over 100 random subsets.
    """
    kid = _fidelity("metric_kid")
    size = min(KID_SUBSET, len(one), len(other))
    result = kid.kid_features_to_metric(one.double(), other.double(), kid_subset_size=size, verbose=False)
    return float(result[kid.KEY_METRIC_KID_MEAN]), float(result[kid.KEY_METRIC_KID_STD])


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Returns IS (Salimans et al. 2016, arXiv 1606.03498, section 4) over at most ten splits of 100 samples or more.

    Args:
        logits: [N, classes] of any classifier.
    Returns:
        Mean and standard deviation over the splits.
    """
    isc = _fidelity("metric_isc")
    result = isc.isc_features_to_metric(logits, splits=min(10, max(1, len(logits) // 100)))
    return result[isc.KEY_METRIC_ISC_MEAN], result[isc.KEY_METRIC_ISC_STD]


def ball_radii(features: Tensor) -> Tensor:
    """Returns the squared distance [N] float64 of each sample to its `NEIGHBOURS`-th nearest other, for precision and recall.

    The result is at least the rounding error of the distance between equal samples.

    Args:
        features: [N, D], more than `NEIGHBOURS` of them.
    """
    # The nearest sample is the sample itself.
    nearest = [x.topk(NEIGHBOURS + 1, largest=False).values[:, -1] for x in _squared_distances(features, features)]
    return torch.cat(nearest).maximum(_ROUNDING * features.double().square().sum(1))


def precision_recall(
    generated: Tensor, reference: Tensor, radii: tuple[Tensor, Tensor] | None = None
) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991, equations 1 and 2).

    Faster than torch-fidelity, which takes minutes for ten thousand samples.

    Args:
        generated, reference: features [N, D] and [M, D], more than `NEIGHBOURS` of each.
        radii: of both sets, if known, see `ball_radii`.
    """
    of_generated, of_reference = radii or (ball_radii(generated), ball_radii(reference))
    precise, recalled = 0, torch.zeros(len(reference), dtype=torch.bool)
    for radius, squared in zip(of_generated.split(_ROWS), _squared_distances(generated, reference), strict=True):
        precise += int((squared <= of_reference).any(1).sum())
        recalled |= (squared <= radius[:, None]).any(0)
    return precise / len(generated), float(recalled.double().mean())


def _squared_distances(one: Tensor, other: Tensor) -> Iterator[Tensor]:
    """Yields the squared distances of [N, D] and [M, D] in float64, `_ROWS` rows of [N, M] at a time."""
    one, other = one.double(), other.double()
    for rows in one.split(_ROWS):
        yield torch.cdist(rows, other).square_()


def decibels(squared_error: Tensor) -> Tensor:
    """Returns the PSNR in dB of mean squared errors of images in [0, 1]. 120 dB mean equality."""
    return -10 * squared_error.clamp_min(1e-12).log10()


def psnr(images: Tensor, expected: Tensor) -> float:
    """Returns the PSNR in dB over all pixels of images [N, C, H, W] in [0, 1]."""
    return float(decibels((images.double() - expected.double()).square().mean()))


def feature_distance(features: Tensor, expected: Tensor) -> float:
    """Returns the mean squared distance between unit vectors of features: 0 for equal directions, 4 for opposite ones.

    Like LPIPS (Zhang et al. 2018, equation 1) with one layer and without learned weights. It was not compared with human
    judgement.

    Args:
        features, expected: [N, D] of any extractor, row by row.
    """
    difference = F.normalize(features.double(), dim=1) - F.normalize(expected.double(), dim=1)
    return float(difference.square().sum(1).mean())


def ssim(images: Tensor, expected: Tensor) -> Tensor:
    """Returns the structural similarity (Wang et al. 2004, equation 13) of images in [0, 1].

    Args:
        images, expected: [N, C, H, W].
    Returns:
        [N] float64.
    Raises:
        UserError: a side is shorter than `SSIM_SMALLEST` pixels.
    """
    if min(images.shape[-2:]) < SSIM_SMALLEST:
        raise UserError(
            "the images are too small for SSIM",
            expected=f"at least {SSIM_SMALLEST} × {SSIM_SMALLEST} pixels",
            got=f"{images.shape[-1]} × {images.shape[-2]}",
            remedy="leave plan.min_ssim out",
        )
    functional = require("torchmetrics.functional.image", "torchmetrics")
    sigma = SSIM_SIGMA if min(images.shape[-2:]) >= 16 else SSIM_SIGMA_SMALL
    values = functional.structural_similarity_index_measure(
        images.double(), expected.double(), sigma=sigma, data_range=1.0, reduction="none"
    )
    return values.reshape(len(images))


def load_lpips(path: Path) -> LPIPS:
    """Loads the LPIPS network over AlexNet (Zhang et al. 2018, arXiv 1801.03924). Its linear layers come with the package.

    Args:
        path: torchvision's ImageNet weights of AlexNet. Nothing is downloaded; no code in the file is executed.
    Raises:
        UserError: the file is missing or does not hold AlexNet, or the package is not installed.
    """
    package = require("lpips", "lpips")
    state = load_state(path, "torchvision's AlexNet weights (alexnet-owt-7be5be79.pth)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torchvision's old interface
        network = package.LPIPS(net="alex", pnet_rand=True, verbose=False)
    wanted = network.net.state_dict()
    # slice2.3.weight of the package is features.3.weight of torchvision.
    taken = {name: state.get("features." + name.partition(".")[2]) for name in wanted}
    unfit = [name for name, tensor in taken.items() if tensor is None or tensor.shape != wanted[name].shape]
    if unfit:
        raise UserError(
            f"{path} does not hold AlexNet's weights",
            expected=f"a tensor features.{unfit[0].partition('.')[2]} {list(wanted[unfit[0]].shape)}",
            got=", ".join(list(state)[:3]) or "an empty file",
            remedy="give the file that torchvision.models.alexnet takes",
        )
    network.net.load_state_dict(taken)
    return network.eval().requires_grad_(False)


def lpips(network: LPIPS, images: Tensor, expected: Tensor) -> Tensor:
    """Returns the perceptual distance of images in [0, 1]. [N, C, H, W] twice, C 1 or 3 → [N].

    Raises:
        UserError: the images have another number of channels.
    """
    if images.shape[1] not in (1, 3):
        raise UserError(
            "LPIPS cannot compare these samples",
            expected="grey or colour images, of 1 or 3 channels",
            got=f"{images.shape[1]} channels",
            remedy="leave --lpips-weights out; in a recipe, leave lpips_weights and max_lpips out",
        )

    def prepared(x: Tensor) -> Tensor:
        x = x.float().expand(-1, 3, -1, -1)
        side = min(x.shape[-2:])
        return x if side >= LPIPS_SIDE else F.interpolate(x, scale_factor=LPIPS_SIDE / side, mode="bilinear")

    with torch.no_grad():
        return network(prepared(images), prepared(expected), normalize=True).reshape(len(images)).double()


def check_packages() -> None:
    """Checks the packages of evaluations, before hours of drawing.

    Raises:
        UserError: a package that every evaluation needs is not installed.
    """
    require("torchmetrics.functional.image", "torchmetrics")
    _fidelity("metric_fid")


def _fidelity(module: str) -> Any:
    return require(f"torch_fidelity.{module}", "torch-fidelity")
