"""Draws the samples of an evaluation, in shards of features and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention.sites import SiteCall, attention_hooks
from trtconvert.calib.budget import squared_error
from trtconvert.calib.data import batches_of
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.errors import UserError
from trtconvert.evaluate import metrics
from trtconvert.evaluate.clipping import Clipping
from trtconvert.evaluate.features import Extractor
from trtconvert.evaluate.records import Request
from trtconvert.evaluate.torch_int8 import NonfiniteCounts, TorchInt8
from trtconvert.models.denoiser import DenoiserInType
from trtconvert.reuse.schedule import reuse_of
from trtconvert.wrapped import WrappedDenoiser


class _FiniteWatch(WrappedDenoiser):
    """A denoiser that records which samples of its batch stayed finite."""

    def __init__(self, denoiser: Denoiser, samples: int) -> None:
        super().__init__(denoiser)
        self.finite = torch.ones(samples, dtype=torch.bool)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        output = self._denoiser(*inputs, **named)
        # With guidance, rows i and i + samples belong to the same sample.
        self.finite &= output.detach().flatten(1).isfinite().all(1).cpu().view(-1, len(self.finite)).all(0)
        return output


class _AllSteps(WrappedDenoiser):
    """A denoiser without step reuse: every step is computed."""

    reuse = None


@dataclass(frozen=True)
class Drawing:
    sampler: Sampler
    batch: int
    request: Request

    def draw(self, denoiser: Denoiser, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draws samples [N, C, H, W] in [0, 1]. The second result [N] says which never met NaN or Inf."""
        images, finite = [], []
        for part in batches_of(len(seeds), self.batch):
            here = seeds[part.start : part.stop]
            watch = _FiniteWatch(denoiser, len(here))
            images.append(self.sampler(watch, here, steps=self.request.steps, solver=self.request.solver))
            # A decoder may overflow as well.
            finite.append(watch.finite & images[-1].flatten(1).isfinite().all(1).cpu())
        return torch.cat(images), torch.cat(finite)

    def sample_shape(self, denoiser: Denoiser) -> torch.Size:
        """Returns [C, H, W], from a sample of one step."""
        return self.sampler(denoiser, [self.request.seed], steps=1, solver="ddim").shape[1:]


class Pairs:
    """Makes shards of INT8 and full-precision samples: features, errors and finiteness."""

    def __init__(
        self,
        int8: Denoiser,
        source: DiffusionModel | None,
        drawing: Drawing,
        extractor: Extractor,
        lpips_weights: Path | None,
        clipping: Clipping | None,
    ) -> None:
        self._clipping = clipping
        self._int8, self._drawing, self._extractor = int8, drawing, extractor
        self._full_denoiser: DenoiserInType | None = None
        if source is not None:
            self._full_denoiser = DenoiserInType(
                source, getattr(torch, drawing.request.dtype), attention_hooks(self._attend)
            )
        self._nonfinite = NonfiniteCounts()
        self._lpips = metrics.load_lpips(lpips_weights) if lpips_weights and source else None

    def make(self, held: range) -> dict[str, Tensor]:
        """Makes one shard: INT8 samples and, with a full-precision model, its samples of the same seeds."""
        first = self._drawing.request.seed
        seeds = range(first + held.start, first + held.stop)
        if isinstance(self._int8, TorchInt8):
            self._int8.take_nonfinite()  # of samples of a shape, and of samples with all steps
        int8, finite = self._drawing.draw(self._int8, seeds)
        shard = self._seen("int8", int8, finite)
        if isinstance(self._int8, TorchInt8):
            for kind, counts in self._int8.take_nonfinite().items():
                shard |= {f"int8-{kind}.{name}": torch.tensor(n) for name, n in counts.items()}
        if self._full_denoiser is None:
            return shard
        full, finite, broken = self._full(seeds)
        if self._clipping is not None:
            shard |= {f"clipped-{tensor}.{site}": x for (site, tensor), x in self._clipping.take().items()}
        shard |= self._seen("full", full, finite) | {f"site.{name}": x for name, x in broken.items()}
        shard["squared_error"] = squared_error(int8, full)
        if reuse_of(self._int8) is not None:
            every, _ = self._drawing.draw(_AllSteps(self._int8), seeds)
            shard["squared_error_all_steps"] = squared_error(every, full)
            shard["squared_error_of_steps"] = squared_error(int8, every)
        if min(int8.shape[-2:]) >= metrics.SSIM_SMALLEST:
            shard["ssim"] = metrics.ssim(int8, full)
        if self._lpips is not None:
            shard["lpips"] = metrics.lpips(self._lpips, int8, full)
        return shard

    def make_others(self, held: range) -> dict[str, Tensor]:
        """Makes one shard of full-precision samples, of the seeds after those of the pairs."""
        first = self._drawing.request.seed + self._drawing.request.samples
        images, finite, _ = self._full(range(first + held.start, first + held.stop))
        if self._clipping is not None:
            self._clipping.take()  # only pairs count
        return self._seen("full", images, finite)

    def _full(self, seeds: range) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns samples, which of them are finite, and by site the number of sample calls with NaN or Inf."""
        assert self._full_denoiser is not None
        images, finite = self._drawing.draw(self._full_denoiser, seeds)
        return images, finite, self._nonfinite.take()

    def _attend(self, call: SiteCall) -> Tensor:
        if self._clipping is not None:
            self._clipping.add(call)
        out = call.exact()
        self._nonfinite.add(call.name, out)
        return out

    def _seen(self, name: str, images: Tensor, finite: Tensor) -> dict[str, Tensor]:
        features = features_of(
            self._extractor, images.nan_to_num(0, 1, 0)
        )  # rows that are not finite are not read later
        return {f"{name}.{kind}": x for kind, x in features.items()} | {f"{name}.finite": finite}


def features_of(extractor: Extractor, images: Tensor) -> dict[str, Tensor]:
    """Returns the features of finite images by name, see `Features.tensors`.

    Raises:
        UserError: a feature is NaN or Inf.
    """
    found = extractor(images).tensors()
    if broken := [kind for kind, x in found.items() if not x.isfinite().all()]:
        raise UserError(
            f"the feature extractor '{extractor.name}' gives NaN or Inf",
            expected="finite features of finite images",
            got=f"NaN or Inf among its {', '.join(broken)} features",
            remedy="correct the extractor, for example by running it in float32, or choose another with --features",
        )
    return found
