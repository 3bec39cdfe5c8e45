"""Calibration: observe every batch once, store its statistics, and compute scales from all batches.

The result depends on the recipe and the data only, not on how many processes shared the batches or how often the run was
interrupted. The statistics of each batch are independent and merged in the order of the batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.blocks import (
    MAX_TABLE_BYTES,
    BlockObserver,
    SiteBlocks,
    block_counts,
    obstacle_at_any_size,
    obstacle_to_blocks,
    table_bytes,
)
from trtconvert.attention.ranges import RangeObserver, Rows, offsets
from trtconvert.attention.sites import Site, SiteCall, find_sites, select_sites
from trtconvert.attention.tables import flaw, refuse_flaw
from trtconvert.bars import Steps
from trtconvert.cache import Cache, versions
from trtconvert.calib.block_plan import require_calibrated_size
from trtconvert.calib.calibration import Calibration, scales
from trtconvert.calib.coverage import CoverageObserver, InputRanges
from trtconvert.calib.data import BadSamples, CalibrationData, Drive, batches_of, nothing_observed, open_data
from trtconvert.calib.distributed import ALONE, Ranks
from trtconvert.calib.dtype_checks import refuse_beyond_float16
from trtconvert.calib.finite_calls import FiniteCalls
from trtconvert.calib.histogram import HistogramObserver, Histograms
from trtconvert.calib.identity import Kind, calibration_reads, data_identity, data_kind, data_name
from trtconvert.calib.layer_observer import LayerObserver, LayerRows, deltas_of
from trtconvert.calib.layer_scales import LayerScales, by_input_group, choose_scales, is_modulated, modiff_patterns
from trtconvert.calib.shards import Shards
from trtconvert.data_flow import DataFlow
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.entry_point import names_of_ours
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line, several, warn
from trtconvert.interception import Hooks, module_of, unseen_product
from trtconvert.linear.sites import Layer, LayerFinder, TensorRef, layer_hooks, model_tensors, select_layers
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import intercepted
from trtconvert.models.drawings import with_progress
from trtconvert.models.offloading import host_memory_free
from trtconvert.models.placed import Place
from trtconvert.provenance import Provenance
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection, Recipe
from trtconvert.runtime.signature import shape_of

COVERAGE_SHARE = 16
"""One in this many samples, the first ones, runs a second time to measure how well the scales cover the data."""

_HELD_BYTES, _HELD_SHARE = 2**32, 0.25
"""Limits of the memory for rows of finished batches: bytes, and a share of the host's free memory. Files hold the rows too."""

_INDICES = "'indices' to have one of the following scalar types"
"""In torch's error for a table that is read at numbers with fractions."""

_HIGHER_ORDER = re.compile(r"no rule registered for .*?(\w+) and mode")
"""The error of torch for operators that take functions, such as flex_attention, which observers of operations do not follow."""


@dataclass(frozen=True)
class Parts:
    """Attention sites and layers that a conversion quantises, and the others, with the reason in `obstacle`."""

    sites: list[Site]
    left_sites: list[Site]
    layers: list[Layer]
    left_layers: list[Layer]


def parts_to_convert(model: DiffusionModel, attention: AttentionSection, layers: LayersSection) -> Parts:
    """Returns the model's attention sites and layers, split by a recipe; see `select_sites` and `select_layers`.

    Raises:
        UserError: the model fails on its own example inputs; see also `find_sites`, `select_sites` and `select_layers`.
    """
    flow = DataFlow()
    finder = LayerFinder(model.denoiser, moving=model.onload is not None, flow=flow)
    unseen: dict[str, str] = {}
    hooks: Hooks = {
        unseen_product: lambda caller, args, _: unseen.setdefault(caller.module() or "the model itself", *args)
    }
    found = _found_sites(model, {**hooks, **({} if layers.off else layer_hooks(finder))}, flow)
    if unseen:
        _tell_unseen(unseen, bool(found))
    chosen, left = select_sites(found, attention.include, attention.exclude)
    if layers.off:
        return Parts(chosen, left, [], [])
    converted, others = select_layers(
        finder.layers(), layers.include, layers.exclude, layers.min_rows, layers.kinds, few_rows=layers.few_rows
    )
    for pattern in modiff_patterns(layers):
        if not modulated_groups(converted, layers.model_copy(update={"modiff": [pattern]})):
            able = [layer.name for layer in converted if not layer.weight_only]
            raise UserError(
                f"the pattern '{pattern}' of layers.modiff matches no layer with INT8 activations"
                if isinstance(layers.modiff, list)
                else "layers.modiff finds no layer with INT8 activations",
                expected="a pattern of one of: " + (several(able, 8) or "none: the recipe converts no such layer"),
                got=f"'{pattern}'" if isinstance(layers.modiff, list) else str(layers.modiff).lower(),
                remedy="correct layers.modiff in the recipe, or set it to false",
            )
    return Parts(chosen, left, converted, others)


def _tell_unseen(unseen: Mapping[str, str], any_site: bool) -> None:
    """Warns of products that cannot be converted, by module; a UserError if no attention is left."""
    name, operator = next(iter(unseen.items()))
    problem = f"TorchScript, C++ or torch.ops compute products in {several([*unseen], 3)}, which cannot be converted"
    expected, got = "calls of torch's functions from Python", f"{operator} in {name}"
    remedy = "set PYTORCH_JIT=0 in the environment, which keeps functions for TorchScript in Python"
    if not any_site:
        raise UserError(f"{problem}, and no attention beside them", expected=expected, got=got, remedy=remedy)
    warn(f"{problem} and stay in 16 bits; expected: {expected}, got: {got}; remedy: {remedy}")


def _refuse_unfit_output(model: DiffusionModel, output: Any, sizes: Mapping[str, int]) -> None:
    wanted = shape_of(model.output.shape, sizes)
    if not isinstance(output, Tensor) or list(output.shape) != list(wanted):
        raise UserError(
            f"{model.name} does not give the prediction that it describes",
            expected=f"a tensor {list(wanted)} from the denoiser, as in the model's `output`",
            got=f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__,
            remedy="return the prediction alone from the denoiser's forward, and describe its shape in `output`",
        )


def _found_sites(model: DiffusionModel, also: Hooks, flow: DataFlow) -> list[Site]:
    """Finds the model's attention sites; `also` and `flow` observe the same forward. Raises a UserError if the model fails on
    its own example inputs."""
    sizes = {name: opt for name, (_, opt, _) in model.dims.items()}
    device = model.device

    def find() -> list[Site]:
        inputs = {name: x.to(device) for name, x in model.example(0, sizes).items()}
        refusing = model.denoiser.register_forward_hook(
            lambda _module, _args, output: _refuse_unfit_output(model, output, sizes)
        )
        try:
            return find_sites(model.denoiser, inputs, model.timestep_input, also, flow)
        except TrtconvertError:
            raise
        except Exception as error:  # the model may raise anything
            if isinstance(error, NotImplementedError) and (operator := _HIGHER_ORDER.search(str(error))):
                raise UserError(
                    f"{model.name} computes {operator[1]}, which is not converted",
                    expected="attention by torch's scaled_dot_product_attention, or by products and softmax",
                    got=f"{operator[1]} in {module_of(model.denoiser, error) or 'the model itself'}",
                    remedy="keep the model as it is, or convert one that computes its attention in this way",
                ) from error
            raise UserError(
                f"{model.name} cannot be run",
                expected="a model that takes " + ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items()),
                got=kind_and_first_line(error),
                remedy="declare an input that is looked up in a table (nn.Embedding) as int64"
                if _INDICES in str(error)
                else "correct the model, or its inputs and sizes (for a pipeline: model.options); --debug shows where it failed",
            ) from error
        finally:
            refusing.remove()

    found = find()
    batch = model.inputs[0].shape[0]
    mixed = any(site.folds > 1 or site.unfused for site in found)
    if isinstance(batch, str) and sizes[batch] == 1 < model.dims[batch][2] and mixed:
        sizes[batch] = 2  # one sample does not show which batch elements of an attention belong together
        found = find()
    if model.left_sites:  # these sites have the names of a model file
        found = [site for site in found if not site.unfused]
    return [*found, *model.left_sites]


def calibrate(
    model: DiffusionModel,
    section: CalibrationSection,
    weights: str,
    sites: Sequence[Site],
    work: Path,
    bar: Steps,
    ranks: Ranks = ALONE,
    *,
    skip_bad: bool = False,
    layers: Sequence[Layer] = (),
    of_layers: LayersSection | None = None,
    shares: Sequence[float] = (),
    dtype: str = "float32",
) -> Calibration:
    """Computes scales of the given sites and layers, and the blocks that sites need.

    Args:
        weights: SHA-256 of the model, see `trtconvert.models.identity`.
        sites: sites to observe.
        work: folder for the statistics of finished batches. Batches found there are not computed again, so the folder must
            belong to exactly this calibration; the caller names it by a hash and removes it at the end.
        ranks: processes that share the work; all call this function with the same arguments.
        skip_bad: leave bad samples out and list them in the provenance.
        layers: layers to observe; of_layers: options of their scales.
        shares: shares of attention that may be lost, rising; the needed blocks are found for each share, at the sites that may
            have block masks, see `obstacle_to_blocks`.
        dtype: of engines.
    Returns:
        The calibration, the same on all ranks.
    Raises:
        UserError: the data does not fit or is empty; NaN or Inf, or numbers beyond the type of engines, at a site or a layer.
        RankLost: another process has ended.
    """
    of_layers = of_layers or LayersSection()
    modulated = modulated_groups(layers, of_layers)
    if modulated:
        refuse_without_order(section)
    # Rank 0 alone reads the rows.
    room = min(_HELD_BYTES, int(_HELD_SHARE * host_memory_free())) if ranks.rank == 0 else 0
    shards, bad = Shards(work, room), BadSamples(skip_bad)
    data = open_data(with_progress(model, bar), section, bad)
    with_elements = section.statistic != "batch-max"
    if data.count is not None:
        of_coverage = len(batches_of(_covered(section).samples, section.batch)) if ranks.rank == 0 else 0
        of_scales = 1 if layers and ranks.rank == 0 else 0
        bar.total(data.count * (2 if with_elements else 1) + of_coverage + of_scales)

    observer = RangeObserver([site.name for site in sites], model.timestep_max, section.bins)
    layer_observer = LayerObserver(
        {layer.input_group for layer in layers},
        model.timestep_max,
        section.bins,
        deltas=modulated,
        falls=model.timesteps_fall,
    )
    sparse = _sparse_sites(sites, shares)
    block_observer = BlockObserver(sparse, shares, model.timestep_max, section.bins)

    def observe(call: SiteCall) -> Tensor:
        output = observer(call)  # refuses NaN and Inf
        block_observer.observe(call)
        return output

    def finish() -> tuple[dict[str, Rows], dict[str, LayerRows]]:
        return observer.finish(), layer_observer.finish()

    observed = intercepted(model, observe if sparse else observer, layer_observer if layers else None)
    if not sparse and not modulated:  # block masks and deltas synchronise with the host in each call
        observed = graphed(model, observed, notes=(observer.notes, layer_observer.notes), counts=True)
    # NaN and Inf show in the first batch, which may take hours: it is checked call by call.
    of_first = FiniteCalls(observed, model, finish)
    # Batches with samples that an earlier run skipped run again if this run skips none.
    finished = shards.batches() if skip_bad else shards.whole_batches()
    for index, batch in _own_share(data, finished, ranks, bar):
        _run(batch, of_first or observed)
        of_first = None
        rows_of_sites, rows_of_layers = finish()
        if dtype == "float16":
            refuse_beyond_float16(model, rows_of_sites, rows_of_layers)
        shards.write(index, rows_of_sites, bad.take(), rows_of_layers, block_observer.finish())
    ranks.collect(shards.folder, shards.names())
    if ranks.rank == 0 and not len(shards):
        raise nothing_observed(shards.skipped())

    histograms = _counted_elements(model, sites, section, data, shards, ranks, bar) if with_elements else None

    def made() -> Calibration:
        tables = scales(shards, section.percentile, section.bins, statistic=section.statistic, histograms=histograms)
        seen, inputs = _coverage(with_progress(model, bar), section, tables, bar)
        provenance = _provenance(model, section, weights, shards)
        of_inputs = _layer_scales(model, layers, of_layers, section, shards, bar)
        blocks = {
            site.name: SiteBlocks.of(shards.blocks(site.name), shares, block_counts(site), section.bins)
            for site in sparse
        }
        return Calibration(tables, provenance, seen.outliers(), seen.magnitudes(), of_inputs, inputs.found(), blocks)

    calibration = ranks.broadcast(made() if ranks.rank == 0 else None)
    assert calibration is not None
    return calibration


def _counted_elements(
    model: DiffusionModel,
    sites: Sequence[Site],
    section: CalibrationSection,
    data: CalibrationData,
    shards: Shards,
    ranks: Ranks,
    bar: Steps,
) -> Histograms:
    """Runs all batches a second time and counts elements by magnitude. Rank 0 returns the counts of all ranks."""
    means = ranks.broadcast(offsets(shards, section.bins) if ranks.rank == 0 else {})
    heads = {site.name: site.heads for site in sites}
    counter = HistogramObserver(means, heads, model.timestep_max)
    counting, counted = graphed(model, intercepted(model, counter), counts=True), []
    for index, batch in _own_share(data, shards.counted(), ranks, bar):
        _run(batch, counting)
        counted.append(index)
        shards.write_counts(counted, counter.histograms)
    ranks.collect(shards.folder, shards.names())
    histograms = HistogramObserver(means, heads, model.timestep_max).histograms
    if ranks.rank == 0:
        shards.add_counts(histograms)
    return histograms


def _sparse_sites(sites: Iterable[Site], shares: Sequence[float]) -> list[Site]:
    """Returns the sites whose needed blocks are recorded."""
    return [site for site in sites if shares and not obstacle_to_blocks(site)]


def refuse_without_blocks(
    model: DiffusionModel, sites: Sequence[Site], dims: Mapping[str, tuple[int, int, int]], bins: int
) -> None:
    """Checks that a recipe with attention.sparse can have block masks.

    Args:
        sites: converted sites; dims: symbolic dimension: (min, opt, max), of the engine; bins: number of timestep bins.
    Raises:
        UserError: sizes vary or differ from the calibration's, no site may have a block mask, or the masks are larger than
            `MAX_TABLE_BYTES`.
    """
    require_calibrated_size(model, dims)
    reasons = {site.name: obstacle_to_blocks(site) for site in sites}
    if all(reasons.values()):
        name, reason = next(iter(reasons.items()))
        larger = ", or convert the model at a larger size"
        raise UserError(
            "attention.sparse is on, but no attention site can have a block mask",
            expected="a site with self-attention, without a mask of its own, one sequence per sample and enough tokens",
            got=f"{len(reasons)} sites, such as {name}: {reason}",
            remedy="set attention.sparse to off" + (larger if not all(map(obstacle_at_any_size, sites)) else ""),
        )
    if (size := table_bytes(sites, bins)) > MAX_TABLE_BYTES:
        fitting = bins * MAX_TABLE_BYTES // size
        fewer = f"set calibration.bins to {fitting} or less, " if fitting else ""
        raise UserError(
            "the block masks of attention.sparse would be too large for a graph and its engines",
            expected=f"{MAX_TABLE_BYTES / 2**30:g} GiB at most, one byte per block, head and timestep bin",
            got=f"{size / 2**30:.1f} GiB for {bins} timestep bins",
            remedy=f"{fewer}convert the model at a smaller size, or set attention.sparse to off",
        )


def _layer_scales(
    model: DiffusionModel,
    layers: Sequence[Layer],
    section: LayersSection,
    calibration: CalibrationSection,
    shards: Shards,
    bar: Steps,
) -> dict[str, LayerScales]:
    """Returns the scales of the layers' inputs, by input group. Tied weights are not equalised, as each use has other factors."""
    tensors, modulated = model_tensors(model.denoiser), modulated_groups(layers, section)
    device = model.device
    users: dict[TensorRef, set[str]] = {}
    for layer in layers:
        users.setdefault(layer.weight, set()).add(layer.input_group)
    scales, groups = dict[str, LayerScales](), by_input_group(layers)
    for input_group, of_group in groups.items():
        scales[input_group] = choose_scales(
            of_group,
            shards.layer(input_group).to(device),
            tensors,
            calibration.bins,
            statistic=section.scales,
            percentile=calibration.percentile,
            offsets=section.offsets,
            equalise=section.equalise and all(len(users[layer.weight]) == 1 for layer in of_group),
            deltas=_deltas(shards, input_group).to(device) if input_group in modulated else None,
        )
        bar.within(len(scales) / len(groups))
    if groups:
        bar.step()
    return scales


def _deltas(shards: Shards, input_group: str) -> LayerRows:
    """Returns the deltas' rows of an input group; UserError if there are none."""
    try:
        return shards.layer(deltas_of(input_group))
    except KeyError as error:
        raise UserError(
            f"{input_group} was not called in two successive steps",
            expected="samples that are denoised step by step, in the same sizes",
            got="calls that do not succeed each other",
            remedy="raise calibration.steps, or exclude the layer from layers.modiff by listing patterns of the other layers",
        ) from error


def modulated_groups(layers: Iterable[Layer], section: LayersSection) -> set[str]:
    """Returns the input groups of the layers whose deltas from step to step a recipe quantises, see `is_modulated`."""
    return {layer.input_group for layer in layers if is_modulated(layer, section)}


def refuse_without_order(section: CalibrationSection) -> None:
    """Raises a UserError if the calibration data has no successive steps, which layers.modiff needs."""
    kind = data_kind(section.data)
    problem = "" if kind in (Kind.DENOISE, Kind.PROMPTS) else f"calibration.data: {kind}"
    if not problem and section.steps < 2:
        problem = f"calibration.steps: {section.steps}"
    if problem:
        raise UserError(
            "layers.modiff cannot be calibrated on this data",
            expected="samples that are denoised step by step: calibration.data denoise or prompts (.txt), in 2 steps or more",
            got=problem,
            remedy="set calibration.data to denoise and calibration.steps to the sampler's number of steps, or layers.modiff to "
            "false",
        )


def _coverage(
    model: DiffusionModel, section: CalibrationSection, tables: Mapping[str, Mapping[str, Tensor]], bar: Steps
) -> tuple[CoverageObserver, InputRanges]:
    """Measures how well the scales cover the first samples, and the ranges of the denoiser's inputs. Bad samples are skipped:
    they were reported before."""
    part = _covered(section)
    observer = CoverageObserver(tables, model.timestep_max)
    ranges = InputRanges(model, section.bins)
    observed = ranges.around(graphed(model, intercepted(model, observer), counts=True))
    for batch in open_data(model, part, BadSamples(skip=True)).batches:
        _run(batch, observed)
        bar.step()
    return observer, ranges


def _covered(section: CalibrationSection) -> CalibrationSection:
    """Returns the section for the samples that measure the coverage."""
    return section.model_copy(update={"samples": max(1, section.samples // COVERAGE_SHARE)})


def _own_share(data: CalibrationData, done: set[int], ranks: Ranks, bar: Steps) -> Iterator[tuple[int, Drive]]:
    """Yields this process's share of the batches that no process has finished; processes take turns."""
    done = set().union(*ranks.gather(done))
    missing = 0
    for index, batch in enumerate(data.batches):
        if index in done:
            bar.skip()
            continue
        if missing % ranks.size == ranks.rank:
            yield index, batch
        missing += 1
        bar.step()


@torch.no_grad()
def _run(batch: Drive, denoiser: Callable[..., Tensor]) -> None:
    batch(denoiser)


def _provenance(model: DiffusionModel, section: CalibrationSection, weights: str, shards: Shards) -> Provenance:
    observed = shards[next(iter(shards))].bin.bincount(minlength=section.bins)
    return Provenance(
        model=model.name,
        weights=weights,
        data=data_name(section.data),
        data_hash=data_identity(section.data),
        samples=section.samples,
        batch=section.batch,
        steps=section.steps,
        seed=section.seed,
        percentile=section.percentile,
        statistic=section.statistic,
        bins=section.bins,
        timestep_max=model.timestep_max,
        observed=observed.tolist(),
        skipped=shards.skipped(),
        versions={name: v for name, v in versions().items() if name in ("trtconvert", "torch")},
    )


def _unfit(path: Path, what: str, expected: str, got: str, otherwise: str) -> UserError:
    """Returns the error for a calibration file that a recipe cannot use. otherwise: what to do beside calibrating again."""
    remedy = f"remove calibration.from from the recipe, so that the model is calibrated again{otherwise}"
    return UserError(f"{path} {what}", expected=expected, got=got, remedy=remedy)


def load_calibration(
    path: Path,
    model: DiffusionModel,
    weights: str,
    bins: int,
    sites: Sequence[Site],
    layers: Sequence[Layer] = (),
    modulated: Collection[str] = (),
    shares: Sequence[float] = (),
) -> Calibration:
    """Loads a calibration file for the given sites and layers.

    Args:
        modulated: input groups whose deltas from step to step are quantised.
        shares: shares of attention that may be lost; each share needs block masks.

    Raises:
        UserError: the file is not a calibration, or belongs to another model or other timestep bins, or lacks a site, a layer,
            or some of their tables.
    """
    loaded = Calibration.load(path)
    made = loaded.provenance
    if made.weights != weights:
        expected, got = f"{model.name} with the hash {weights[:16]}", f"{made.model} with the hash {made.weights[:16]}"
        differs = ": the weights, options or code of the model differ from the file's"
        raise _unfit(path, "was calibrated for another model", expected, got, differs)
    if made.bins != bins:
        expected, otherwise = f"{bins}, as calibration.bins asks", f", or set calibration.bins to {made.bins}"
        raise _unfit(path, "has other timestep bins", expected, str(made.bins), otherwise)
    if missing := [site.name for site in sites if site.name not in loaded.tables]:
        otherwise = ", or exclude these sites with attention.exclude"
        raise _unfit(path, "lacks attention sites", ", ".join(missing), ", ".join(loaded.tables), otherwise)
    for site in sites:
        sizes = {"heads": site.heads, "kv_heads": site.kv_heads, "head_dim": site.head_dim}
        refuse_flaw(path, site.name, flaw(loaded.tables[site.name], bins, **sizes))
    names = [site.name for site in sites]
    channels = {layer.input_group: layer.in_channels for layer in layers}
    _require_layers(path, loaded, channels, sorted(modulated), bins)
    sparse = _sparse_sites(sites, shares)
    _require_blocks(path, loaded, sparse, shares)
    return Calibration(
        {name: loaded.tables[name] for name in names},
        made,
        {name: loaded.outliers[name] for name in names if name in loaded.outliers},
        {name: loaded.magnitudes[name] for name in names if name in loaded.magnitudes},
        {input_group: loaded.layers[input_group] for input_group in channels},
        loaded.inputs,
        {site.name: loaded.blocks[site.name] for site in sparse},
    )


def _require_layers(
    path: Path, loaded: Calibration, channels: Mapping[str, int], modulated: Sequence[str], bins: int
) -> None:
    """Raises a UserError if scales of the layers' inputs are missing or not usable, or an input group in `modulated` lacks deltas
    or has offsets; channels: of each input group."""
    if missing := [input_group for input_group in channels if input_group not in loaded.layers]:
        got = ", ".join(loaded.layers) or "attention only, as with layers.modes: off"
        otherwise = ", set layers.modes to off, or exclude these layers with layers.exclude"
        raise _unfit(path, "lacks the ranges of layers", ", ".join(missing), got, otherwise)
    for input_group, count in channels.items():
        refuse_flaw(path, input_group, loaded.layers[input_group].flaw(count, bins), of_layer=True)
    otherwise = ", or set layers.modiff to false"
    if lacking := [input_group for input_group in modulated if loaded.layers[input_group].change_scale is None]:
        expected = f"scales of deltas of {several(lacking, 3)}, which layers.modiff needs"
        got = "scales of whole activations only"
        raise _unfit(path, "lacks the scales of deltas from step to step", expected, got, otherwise)
    if moved := [input_group for input_group in modulated if loaded.layers[input_group].x_offset.any()]:
        expected = "a calibration with layers.modiff, and so without layers.offsets"
        got = f"offsets of {several(moved, 3)}"
        raise _unfit(path, "has offsets of layers, but deltas have no offsets", expected, got, otherwise)


def _require_blocks(path: Path, loaded: Calibration, sites: Sequence[Site], shares: Sequence[float]) -> None:
    """Raises a UserError if blocks of a site are missing, or are those of other sizes."""
    for site in sites:
        found = loaded.blocks.get(site.name)
        held = found.shares if found is not None else []
        if missing := [share for share in shares if share not in held]:
            known = ", ".join(f"{share:g}" for share in held)
            expected = f"blocks of {site.name} for a lost share of {', '.join(f'{share:g}' for share in missing)}"
            got = f"shares of {known}" if held else "no blocks of this site"
            otherwise = ", or set attention.sparse to off" + (f", or use the shares {known}" if held else "")
            raise _unfit(path, "lacks the blocks that attention needs", expected, got, otherwise)
        counts = block_counts(site)
        if found is not None and tuple(found.block_counts.tolist()) != counts:
            expected = f"{counts[0]} × {counts[1]} blocks of {site.name}, which has {site.query_tokens} queries"
            got = " × ".join(map(str, found.block_counts.tolist()))
            raise _unfit(path, "has blocks of other sizes", expected, got, ", or set attention.sparse to off")


def observations_folder(cache: Cache, recipe: Recipe, weights: str, place: Place) -> Path:
    """Returns the folder for the finished batches of a calibration, of a build and of `trtconvert calibrate`.

    Args:
        weights: see `trtconvert.models.identity`; place: where the model computes.
    """
    # Devices round differently, so each device has its own finished batches.
    reads = calibration_reads(recipe, weights) | place.reads() | {"device": place.device}
    # The key covers the modules that load and observe the model, and the modules that the user's functions import.
    own = [name for name in (recipe.model.source, recipe.calibration.data) if isinstance(name, str)]
    code = {__name__, "trtconvert.models", "trtconvert.models.placed"}.union(*map(names_of_ours, own))
    return cache.work("observed", code, reads)
