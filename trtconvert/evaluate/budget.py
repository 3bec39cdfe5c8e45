"""The figures that a recipe's plan section asks for."""

from __future__ import annotations

from torch import Tensor

from trtconvert.calib.budget import Budget, Measure
from trtconvert.evaluate import metrics
from trtconvert.evaluate.features import load_extractor
from trtconvert.recipe import PlanSection


def load_budget(section: PlanSection) -> Budget:
    """Returns the figures with their limits.

    Raises:
        UserError: a package is missing, or weights are missing or unfit.
    """
    budget = [Measure("psnr", metrics.psnr, True, section.min_psnr)]
    if section.min_ssim is not None:
        budget.append(Measure("ssim", lambda x, y: float(metrics.ssim(x, y).mean()), True, section.min_ssim))
    if section.lpips_weights is not None:
        network = metrics.load_lpips(section.lpips_weights)

        def lpips(samples: Tensor, expected: Tensor) -> float:
            return float(metrics.lpips(network, samples, expected).mean())

        budget.append(Measure("lpips", lpips, False, section.max_lpips))
    if section.features is not None:
        extractor = load_extractor(section.features, section.features_weights)

        def distance(samples: Tensor, expected: Tensor) -> float:
            return metrics.feature_distance(extractor(samples).pooled, extractor(expected).pooled)

        budget.append(Measure("feature_distance", distance, False, section.max_feature_distance))
    return budget
