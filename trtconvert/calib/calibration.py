"""Calibrations: from recorded ranges to the scales of the op's tables, and their file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.ranges import Records, Rows, offsets, ranges_of_maxima, seen_bins, spread, tables_of_ranges
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.tables import flaw, read_tensors, refuse_flaw
from trtconvert.bundle import Manifest
from trtconvert.calib.histogram import OCTAVES, Histograms, SiteHistograms
from trtconvert.calib.layer_scales import LayerScales
from trtconvert.errors import UserError
from trtconvert.provenance import Provenance, not_a_calibration

OUTLIERS = ("q_outliers", "k_outliers", "v_outliers")
OCTAVE_COUNTS = ("q_octaves", "k_octaves", "v_octaves")
"""Names of the results of `CoverageObserver`."""

INPUT_AMAX = "input_amax"
"""Name of the result of `InputRanges` for each input."""

OF_BLOCKS = tuple(f.name for f in fields(SiteBlocks))
"""Names of the tensors of `SiteBlocks`."""

OF_LAYERS = tuple(f.name for f in fields(LayerScales))
"""Names of the results of `choose_scales`; results with a default are optional."""
_NEEDED = {f.name for f in fields(LayerScales) if f.default is MISSING}

_GROUPS = {
    "outliers": OUTLIERS,
    "magnitudes": OCTAVE_COUNTS,
    "layers": OF_LAYERS,
    "blocks": OF_BLOCKS,
    "inputs": (INPUT_AMAX,),
}


@dataclass(frozen=True)
class Calibration:
    """Scales and offsets of sites and layers.

    Attributes:
        tables: site: name: the tensors of `AttentionTables` except the modes.
        provenance: how the scales were made.
        layers: scales of the inputs of INT8 layers, by input group.
        outliers: share of elements that the scales clip; magnitudes: counts of elements by their ratio to the range. Both by
            `CoverageObserver`, on a part of the data, see `calibrate`.
        inputs: ranges of the denoiser's inputs in that part, by `InputRanges`.
        blocks: needed blocks of sites that may have block masks, if the recipe asked for block masks.
    """

    tables: Mapping[str, Mapping[str, Tensor]]
    provenance: Provenance
    outliers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    magnitudes: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    layers: Mapping[str, LayerScales] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    blocks: Mapping[str, SiteBlocks] = field(default_factory=dict)

    def with_modes(self, modes: Mapping[str, Sequence[int] | Tensor]) -> dict[str, AttentionTables]:
        """Returns tables of the `Int8Attention` op for the sites in `modes`, with these modes by timestep bin."""
        return {
            site: AttentionTables(**tables, modes=torch.as_tensor(modes[site], dtype=torch.int32))
            for site, tables in self.tables.items()
            if site in modes
        }

    def masks(self, shares: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
        """Block masks [T, H, Bq, Bk] by site, of the sites that `shares` names.

        Args:
            shares: the share of attention that each site may lose, by timestep bin.
        """
        return {site: self.blocks[site].mask(row) for site, row in shares.items()}

    def save(self, path: Path) -> None:
        """Writes one safetensors file with the provenance as JSON in its metadata."""
        of_inputs = {name: {INPUT_AMAX: amax} for name, amax in self.inputs.items()}
        of_layers = {name: scales.tensors() for name, scales in self.layers.items()}
        of_blocks = {name: blocks.tensors() for name, blocks in self.blocks.items()}
        tensors = {
            f"{site}/{name}": t.contiguous()
            for group in (self.tables, self.outliers, self.magnitudes, of_layers, of_inputs, of_blocks)
            for site, named in group.items()
            for name, t in named.items()
        }
        # Python's write reports a full disk; safetensors' own does not.
        path.write_bytes(save(tensors, {"provenance": self.provenance.model_dump_json()}))

    @staticmethod
    def load(path: Path) -> Calibration:
        """Loads a saved calibration.

        Raises:
            UserError: the file is missing, damaged, or not a calibration; or a table is not usable for any purpose.
        """
        provenance, tensors = read_tensors(path)
        found: dict[str, dict[str, dict[str, Tensor]]] = {group: {} for group in ("tables", *_GROUPS)}
        groups = {name: group for group, names in _GROUPS.items() for name in names}
        for site, named in tensors.items():
            for name, tensor in named.items():
                found[groups.get(name, "tables")].setdefault(site, {})[name] = tensor
        tables, outliers, magnitudes = found["tables"], found["outliers"], found["magnitudes"]
        for input_group, named in found["layers"].items():
            if not named.keys() >= _NEEDED:
                lacking = f"{input_group}: {', '.join(named)}, where {', '.join(sorted(_NEEDED))} are needed"
                raise not_a_calibration(path, ValueError(lacking))
        layers = {input_group: LayerScales(**named) for input_group, named in found["layers"].items()}
        bins = provenance.bins
        for site in (*tables, *(outliers.keys() - tables.keys()), *(magnitudes.keys() - tables.keys())):
            refuse_flaw(path, site, flaw(tables.get(site, {}), bins))
            refuse_flaw(path, site, _flaw_of_coverage(tables[site], outliers.get(site, {}), magnitudes.get(site, {})))
        for input_group, of_input in layers.items():
            refuse_flaw(path, input_group, of_input.flaw(of_input.x_offset.numel(), bins), of_layer=True)
        blocks: dict[str, SiteBlocks] = {}
        for site, named in found["blocks"].items():
            if named.keys() != set(OF_BLOCKS):
                refuse_flaw(path, site, f"with {', '.join(named)}, where {', '.join(OF_BLOCKS)} are needed")
            blocks[site] = SiteBlocks(**named)
            refuse_flaw(path, site, _flaw_of_blocks(blocks[site], tables.get(site, {}), bins))
        inputs = {name: named[INPUT_AMAX] for name, named in found["inputs"].items()}
        for name, amax in inputs.items():
            refuse_flaw(path, name, _flaw_of_range(amax, bins))
        return Calibration(tables, provenance, outliers, magnitudes, layers, inputs, blocks)


def modes_of_bundle(manifest: Manifest) -> dict[str, Tensor]:
    """Returns the modes of every converted site, [T] INT32, for `Calibration.with_modes`."""
    return {site.name: torch.tensor(site.modes, dtype=torch.int32) for site in manifest.sites if site.modes}


def load_of_bundle(folder: Path, manifest: Manifest) -> Calibration:
    """Loads the calibration of a bundle, with tables of exactly the sites that the manifest lists as converted.

    Raises:
        UserError: see `Calibration.load`; or tables of a site are missing, or do not fit the site.
    """
    path, bins = folder / manifest.calibration, manifest.recipe.calibration.bins
    found = Calibration.load(path)
    sites = {site.name: site for site in manifest.sites if site.modes}
    lacking = sorted(sites.keys() - found.tables.keys())
    if lacking or found.provenance.bins != bins:
        raise UserError(
            f"{path} is not the calibration of this bundle",
            expected=f"tables of {len(sites)} sites for {bins} timestep bins",
            got=f"none of {lacking[0]}" if lacking else f"{found.provenance.bins} timestep bins",
            remedy="build the bundle again",
        )
    for name, site in sites.items():
        refuse_flaw(path, name, flaw(found.tables[name], bins, heads=site.heads, head_dim=site.head_dim))
        if missing := sorted(set(site.sparse) - {0.0, *(found.blocks[name].shares if name in found.blocks else ())}):
            refuse_flaw(path, name, f"without the blocks at a share of {missing[0]:g}, which the bundle's plan needs")
    return replace(found, tables={name: found.tables[name] for name in sites})


def masks_of_bundle(manifest: Manifest, calibration: Calibration) -> dict[str, Tensor]:
    """Returns the block masks [T, H, Bq, Bk] of the sites that have one."""
    return calibration.masks({site.name: site.sparse for site in manifest.sites if site.sparse})


def _flaw_of_blocks(blocks: SiteBlocks, tables: Mapping[str, Tensor], bins: int) -> str:
    """Returns the flaw of a site's blocks; empty if there is none. `tables`: the site's, without a flaw."""
    if not tables:
        return "with blocks, and no scales"
    found = blocks.flaw(bins)
    heads = tables["q_scale"].shape[1]
    if not found and blocks.block_bits.shape[2] != heads:
        return f"with blocks of {blocks.block_bits.shape[2]} heads, where scales have {heads}"
    return found


def _flaw_of_range(amax: Tensor, bins: int) -> str:
    """Returns the flaw of an input's range; empty if there is none."""
    if tuple(amax.shape) != (bins,) or amax.dtype != torch.float32:
        return f"with {INPUT_AMAX} of {list(amax.shape)} {amax.dtype}, where [{bins}] {torch.float32} is needed"
    return "" if (amax.isfinite() & (amax >= 0)).all() else f"with {INPUT_AMAX} that is negative or not finite"


def _flaw_of_coverage(
    tables: Mapping[str, Tensor], outliers: Mapping[str, Tensor], magnitudes: Mapping[str, Tensor]
) -> str:
    """Returns the flaw of a site's outliers and magnitudes; empty if there is none. Both may be absent. `tables`: the site's,
    without a flaw."""
    rows = {name: tables[f"{name}_scale"].shape[:2] for name in ("q", "k", "v")}
    for names, found in ((OUTLIERS, outliers), (OCTAVE_COUNTS, magnitudes)):
        if found and found.keys() != set(names):
            return f"with {', '.join(sorted(found))}, where {', '.join(names)} are needed"
    for name, x in (*outliers.items(), *magnitudes.items()):
        bins, heads = rows[name[0]]
        of_shares, of_counts = ((bins, heads), torch.float32, 1.0), ((heads, len(OCTAVES)), torch.int64, math.inf)
        shape, dtype, top = of_shares if name in OUTLIERS else of_counts
        if tuple(x.shape) != shape or x.dtype != dtype:
            return f"with {name} of {list(x.shape)} {x.dtype}, where {list(shape)} {dtype} is needed"
        if not ((x >= 0) & (x <= top)).all():  # NaN fails both comparisons
            return f"with {name} outside 0 to {top:g}"
    return ""


def scales(
    records: Records,
    percentile: float,
    bins: int,
    *,
    statistic: str = "batch-max",
    histograms: Histograms | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Computes the tables of every site.

    A range is one of
    - "batch-max": the percentile over denoiser calls of their maxima,
    - "elements": the percentile of all elements' magnitudes,
    - "mse": the range of least squared error, see `Histogram.least_error_range`.
    A bin without calls takes the ranges of the nearest bin with calls.

    Args:
        records: see `RangeObserver`; may load the rows of a site lazily.
        percentile: in (0, 100]; ignored by "mse".
        bins: number of timestep bins.
        histograms: see `HistogramObserver`; required except for "batch-max".
    Returns:
        site: {name: FP32 tensor}, shapes as in `AttentionTables`.
    """
    tables = {}
    for site, rows in records.items():
        means = offsets({site: rows}, bins)[site]
        if histograms is None:
            ranges = ranges_of_maxima(rows, means, percentile / 100, bins)
        else:
            ranges = _ranges_of_elements(histograms[site], rows, means, percentile if statistic == "elements" else None)
        tables[site] = tables_of_ranges(ranges, means)
    return tables


def _ranges_of_elements(
    counted: SiteHistograms, rows: Rows, means: Mapping[str, Tensor], percentile: float | None
) -> dict[str, Tensor]:
    bins, kv_heads, dim = means["v_offset"].shape
    ranges = {}
    for name, shape in (("q", (bins, -1)), ("k", (bins, kv_heads)), ("v", (bins, kv_heads, dim))):
        histogram = getattr(counted, name)
        found = histogram.least_error_range() if percentile is None else histogram.percentile(percentile)
        found = found.cpu().view(shape)
        ranges[name] = spread({index: found[index] for index in seen_bins(rows)}, bins)
    return ranges
