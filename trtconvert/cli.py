"""The command line. Imports what a command needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

from trtconvert import early

# isort: split
import contextlib
import functools
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from trtconvert import __version__
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line
from trtconvert.modiff.commands import commands

if TYPE_CHECKING:
    from trtconvert.cache import Cache
    from trtconvert.diffusion_model import Sampler
    from trtconvert.progress import Output, Reporter
    from trtconvert.recipe import Recipe
    from trtconvert.runtime import LoadedBundle


class _Stopped(KeyboardInterrupt):
    """A signal asked the program to stop. A class of its own: after a plain KeyboardInterrupt that crossed code which a
    library compiles as it is imported, Python ends by SIGINT, whatever exit code was asked for."""


def _importing() -> bool:
    """Whether some module is being imported now."""
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _out_of_host_memory(error: MemoryError) -> TrtconvertError:
    return TrtconvertError(
        "the host's memory ran out",
        expected="room for the model, and for three engines of its size while they are compared",
        got=kind_and_first_line(error),
        remedy="end other programs or add memory; with engine.attention set to plugin or native one engine is built, and none is "
        "compared",
    )


def _start_in_utf8() -> None:
    """Begin anew in UTF-8 where Python takes the locale's ASCII for all there is, which it does where it was told to: the C
    locale alone means UTF-8 to it. Libraries in C++ open paths in UTF-8, and tables have signs beyond ASCII."""
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


_CLEARING_SECONDS = 2.0
"""What removing temporary folders may take."""


class _Commands(click.Group):
    """Turns every failure into a message and an exit code: 2 for the user's mistakes, 1 for what went wrong here, and for
    what a signal stopped 128 and its number.
    """

    stopped_by: int | None = None
    as_json = False  # whether the command that runs now tells of errors as lines of JSON
    _left_at = -math.inf  # seconds, of time.monotonic()

    def main(self, args: Sequence[str] | None = None, *more: Any, **named: Any) -> Any:
        if args is not None:
            return super().main(args, *more, **named)
        # What the shell gave: a process of its own.
        _start_in_utf8()
        try:
            return super().main(None, *more, **named)
        except SystemExit as end:
            early.leave(end.code if isinstance(end.code, int) else int(end.code is not None))

    def stop(self, number: int, _frame: object) -> None:
        """Handles SIGINT and SIGTERM. Leaves by the way of an exception, so that temporary folders go. What comes soon after it
        is ignored, so that it does not cut that short; later, the exception may have got lost on its way up.

        Not out of an import: libraries import modules from C++ code, which ends the process at an exception. Then SIGALRM
        asks again a little later.
        """
        if time.monotonic() < self._left_at + _CLEARING_SECONDS:
            return
        if number != signal.SIGALRM:
            self.stopped_by = number
        if _importing():
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        else:
            self._left_at = time.monotonic()
            raise _Stopped

    def was_stopped(self) -> bool:
        """Whether a signal asked the program to stop. Who hears that it did leaves."""
        if self.stopped_by is not None:
            self._left_at = time.monotonic()
        return self.stopped_by is not None

    def invoke(self, ctx: click.Context) -> Any:
        self.stopped_by, self._left_at, self.as_json = None, -math.inf, False
        # What the process ignores, as jobs in the background ignore Ctrl-C, stays ignored.
        heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        before = {n: signal.signal(n, self.stop) for n in (*heeded, signal.SIGALRM)}
        try:
            return super().invoke(ctx)
        except (click.exceptions.ClickException, click.exceptions.Exit, click.exceptions.Abort):
            raise
        except BrokenPipeError:
            raise  # the reader of a pipe has left; click ends quietly
        except KeyboardInterrupt as interrupt:
            self._end_stopped(interrupt)
        except Exception as error:
            if self.was_stopped():
                # A library that was being imported made an error of its own of the interrupt.
                self._end_stopped(KeyboardInterrupt())
            if ctx.params["debug"]:
                traceback.print_exc()
            if isinstance(error, MemoryError):
                error = _out_of_host_memory(error)
            code = error.exit_code if isinstance(error, TrtconvertError) else 1
            if self.as_json:
                self._tell(error, code)
            if isinstance(error, TrtconvertError):
                click.echo(f"error: {error}", err=True)
                sys.exit(code)
            click.echo(f"internal error: {kind_and_first_line(error)}", err=True)
            click.echo("  remedy: this is a fault of trtconvert; please report it with the output of --debug", err=True)
            sys.exit(1)
        finally:
            if self.stopped_by is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)  # nobody is there any more to be asked again
            # A program that calls this one gets its own handlers back.
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's

    def _end_stopped(self, interrupt: KeyboardInterrupt) -> NoReturn:
        code = 128 + (self.stopped_by or signal.SIGINT)
        if self.as_json:
            self._tell(interrupt, code)
        click.echo(
            "interrupted; finished stages stay in the cache, if one is kept, nothing half-written is left", err=True
        )
        sys.exit(code)

    def _tell(self, error: BaseException, code: int) -> NoReturn:
        from trtconvert.progress import failure, write_event

        write_event(failure(error, code))
        sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtconvert")
@click.option("--debug", is_flag=True, help="Show tracebacks, and why calls are not recorded in CUDA graphs.")
def main(debug: bool) -> None:
    """Turn diffusion models into TensorRT engines with INT8 attention that follows the denoising timestep."""
    from trtconvert.entry_point import look_in

    if debug:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("trtconvert").setLevel(logging.DEBUG)

    look_in(Path())


def _speaking(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --quiet and --json to a command, which says all that it says through its argument `out`."""

    @click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print the result as a JSON object, and progress and errors as lines of JSON on the standard error.",
    )
    @functools.wraps(command)
    def wrapped(quiet: bool, as_json: bool, **named: Any) -> None:
        from trtconvert.progress import Output

        if quiet and as_json:
            raise UserError(
                "--quiet and --json exclude each other",
                expected="one of them",
                got="both",
                remedy="leave --quiet out: with --json, the standard output has the result alone",
            )
        main.as_json = as_json
        out = Output("json" if as_json else "quiet" if quiet else "text", main.was_stopped)
        with out.kept_clean():
            command(out=out, **named)

    return wrapped


_DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where the model computes, instead of what the recipe's compute section says: auto by default, the GPU where there "
    "is one and the model fits, as a whole or block by block.",
)


_OFFLOAD = click.option(
    "--offload",
    is_flag=True,
    help="Let the torch model's weights lie in host memory and come to the GPU block by block, for models larger than it. By "
    "default this is done where the model does not fit otherwise; see compute.offload in recipes.",
)


def _on(device: str | None, offload: bool, recipe: Recipe) -> Recipe:
    """The recipe with another device, where one is given, and with offloading, where that is asked for."""
    asked = ({} if device is None else {"device": device}) | ({"offload": "on"} if offload else {})
    return recipe.model_copy(update={"compute": recipe.compute.model_copy(update=asked)})


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle; out/NAME by default.")
@click.option("--cache", "cache_folder", type=click.Path(path_type=Path), help="Folder of the build cache.")
@click.option("--no-cache", is_flag=True, help="Redo every stage, and keep nothing.")
@click.option("--skip-bad", is_flag=True, help="Leave bad calibration samples out, and list them.")
@_DEVICE
@_OFFLOAD
@_speaking
def build(
    recipe: Path,
    output: Path | None,
    cache_folder: Path | None,
    no_cache: bool,
    skip_bad: bool,
    device: str | None,
    offload: bool,
    out: Output,
) -> None:
    """Convert the model of RECIPE and leave a bundle.

    RECIPE may be an ONNX file, which stands for what `init` writes for it, or digits-dit, a small model that comes with the
    program.
    """
    from trtconvert import pipeline, summary

    report = out.reporter()
    output = output or Path("out") / recipe.stem
    with _cache(cache_folder, no_cache) as cache:
        loaded = _on(device, offload, _recipe(recipe, report))
        outcome = pipeline.build(loaded, output, cache, report, skip_bad=skip_bad)
    out.result(
        {"bundle": outcome.folder, **_times(report), "manifest": outcome.manifest.model_dump(mode="json")},
        show=lambda _: summary.print_build(outcome, report),
    )


def _times(report: Reporter) -> dict[str, Any]:
    """Of stages, for programs."""
    seconds = {name: round(seconds, 3) for name, seconds in report.seconds.items()}
    return {"seconds": seconds, "reused": sorted(report.reused)}


def _recipe(path: Path, report: Reporter) -> Recipe:
    """A recipe; of an ONNX file that with which it begins, and by its name one that comes with the program.

    Args:
        report: told what is assumed of an ONNX file.
    Raises:
        UserError: there is none, or it cannot be used.
    """
    from trtconvert.recipe import ONNX_SUFFIX, load_recipe
    from trtconvert.starter import assumptions, named_recipe, recipe_of

    if path.suffix != ONNX_SUFFIX:
        return load_recipe(path if path.exists() else named_recipe(path))
    with recipe_of(path) as file:
        if assumed := assumptions(file.read_text(encoding="utf-8")):
            report.notice(
                f"assumed of {path.name}: {', '.join(assumed)}; `trtconvert init` writes a recipe to correct it in"
            )
        return load_recipe(file)


@contextlib.contextmanager
def _cache(folder: Path | None, disabled: bool) -> Iterator[Cache]:
    from trtconvert.cache import Cache, default_folder
    from trtconvert.files import temporary_folder

    if disabled:
        with temporary_folder() as name:
            yield Cache(name / "cache")  # the folder itself is locked while it is in use, and the cache locks its own
    else:
        yield Cache(folder or default_folder())


@main.command("compile")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--cache", "cache_folder", type=click.Path(path_type=Path), help="Folder of the build cache.")
@click.option("--no-cache", is_flag=True, help="Build every engine again, and keep none elsewhere.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="engine.FIELD=VALUE",
    help="Instead of what the bundle's recipe says, as engine.attention=native; several times for several fields. The bundle "
    "keeps it.",
)
@_speaking
def compile_command(
    bundle: Path, cache_folder: Path | None, no_cache: bool, changes: tuple[str, ...], out: Output
) -> None:
    """Build the TensorRT engine of this machine's GPU into BUNDLE, with no model code and no calibration.

    Engines that an earlier call has finished are taken from the cache. Where one cannot be built, as for want of memory, --set
    changes what the recipe asks for: engine.attention, engine.workspace_mb, engine.shapes and others.
    """
    from trtconvert import summary
    from trtconvert.compile import compile_bundle
    from trtconvert.files import settled

    report = out.reporter()
    bundle = settled(bundle)
    with _cache(cache_folder, no_cache) as cache:
        manifest = compile_bundle(bundle, report, cache, changes)
    out.result(
        {"bundle": bundle, **_times(report), "manifest": manifest.model_dump(mode="json")},
        show=lambda console: summary.print_manifest(console, manifest, bundle),
    )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@_speaking
def inspect(bundle: Path, out: Output) -> None:
    """Show what BUNDLE holds, after checking every file in it. With --json, its manifest."""
    from trtconvert import summary
    from trtconvert.bundle import Manifest, check_files, read_unchanged

    def shown(manifest: Manifest) -> Any:
        check_files(bundle, manifest)
        return manifest.model_dump(mode="json"), summary.manifest_table(manifest, bundle)

    values, table = read_unchanged(bundle, shown)
    out.result(values, show=lambda console: console.print(table))


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("samples.png"), show_default=True)
@click.option(
    "-p", "--prompt", "prompts", multiple=True, help="What to show; several take turns. For bundles with components."
)
@click.option("-n", "--samples", type=click.IntRange(1, 1024), help="One per prompt by default, or 16.")
@click.option("--steps", type=click.IntRange(1), default=50, show_default=True)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim", show_default=True)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1025), default=0, show_default=True, help="Seed of the first sample."
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Of the model that BUNDLE was made from, where its sampler needs more than the denoiser.",
)
@click.option(
    "--devices",
    help="Several GPUs, as cuda:0,cuda:1, among which the samples of each call are shared out.",
)
@_speaking
def run(
    bundle: Path,
    output: Path,
    prompts: tuple[str, ...],
    samples: int | None,
    steps: int,
    solver: str,
    seed: int,
    weights: Path | None,
    devices: str | None,
    out: Output,
) -> None:
    """Sample images with BUNDLE on what this machine can run."""
    from trtconvert import runtime
    from trtconvert.bundle import MANIFEST
    from trtconvert.documents import text_flaw
    from trtconvert.evaluate.grid import save_sheet
    from trtconvert.files import whole_file
    from trtconvert.runtime.batches import AnyBatch

    if output.suffix.lower() != ".png":
        raise UserError(
            f"samples are not written as '{output.name}'",
            expected="a file that ends in .png",
            got=output.suffix or "no ending",
            remedy="give another file with -o",
        )
    for prompt in prompts:
        if flaw := text_flaw(prompt):
            raise UserError(
                "a prompt is no text",
                expected=f"characters of {sys.getfilesystemencoding()}, which the command line is read in",
                got=f"{flaw}, in {prompt!a}",
                remedy="type the prompt anew, or give it in the encoding of the terminal; "
                "one that comes from a file has to be UTF-8",
            )
    started = time.perf_counter()
    loaded = runtime.load(bundle, devices=None if devices is None else [name.strip() for name in devices.split(",")])
    place, folder = output.resolve(), loaded.folder.resolve()
    taken = {(loaded.folder / name).resolve() for name in (MANIFEST, *loaded.manifest.files)}
    if place in taken or (place.is_relative_to(folder) and loaded.manifest.is_own(str(place.relative_to(folder)))):
        raise UserError(
            f"{output} is a file of the bundle, or would count as one, and it would no longer be what was built",
            expected="a place of its own for the samples",
            got=str(output),
            remedy="give another file with -o",
        )
    # Samplers choose a prompt by the seed: the first sample should show the first one.
    first = seed % max(1, len(prompts))
    draw = _sampler(loaded, prompts[-first:] + prompts[:-first], weights)
    samples, loading = samples or len(prompts) or 16, time.perf_counter() - started
    with whole_file(output, "give another file with -o") as partial:
        started = time.perf_counter()
        images = draw(AnyBatch(loaded["denoiser"]), range(seed, seed + samples), steps=steps, solver=solver)
        seconds = time.perf_counter() - started
        save_sheet(images, partial)
    drawn = f"{samples} {'sample' if samples == 1 else 'samples'} in {seconds:.2g} s"
    out.result(
        {
            "output": output,
            "samples": samples,
            "seconds": round(seconds, 3),
            "loading_seconds": round(loading, 3),
            "backend": loaded.backend,
        },
        f"{drawn}, loaded in {loading:.2g} s, on {loaded.backend}: {output}",
    )


def _sampler(bundle: LoadedBundle, prompts: Sequence[str], weights: Path | None) -> Sampler:
    """What draws with a bundle's denoiser.

    Raises:
        UserError: it needs weights that are not here, or takes none; or those that were given are not what it was made from.
    """
    from trtconvert import models
    from trtconvert.evaluate.evaluation import full_precision

    if weights is None or (prompts and not bundle.manifest.pipeline):
        return models.load_sampler(bundle, prompts)
    if bundle.manifest.pipeline:
        raise UserError(
            f"{bundle.folder} draws by itself",
            expected="no weights: it has all that its pipeline needs",
            got=f"--weights {weights}",
            remedy="leave --weights out",
        )
    model = full_precision(bundle, weights)
    assert model is not None  # as weights were given
    return model.sample


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--weights", type=click.Path(path_type=Path), help="Weights of the full-precision model, to compare with."
)
@click.option("-n", "--samples", type=click.IntRange(10), default=10_000, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim", show_default=True)
@click.option(
    "--seed", type=click.IntRange(0, 2**62), default=100_000, show_default=True, help="Seed of the first sample."
)
@click.option(
    "--features",
    help="digits-classifier, emoji-classifier, inception, or package.module:function; a shipped model's own by default.",
)
@click.option("--features-weights", type=click.Path(path_type=Path), help="Weights of the feature extractor.")
@click.option(
    "--reference", help="digits or emoji (held out), or a folder of images; a shipped model's own by default."
)
@click.option("--lpips-weights", type=click.Path(path_type=Path), help="torchvision's AlexNet weights: adds LPIPS.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Of the torch model, and of the feature extractor. auto takes the GPU where there is one and the model fits.",
)
@_OFFLOAD
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What the full-precision model computes in; 16 bits compare with the pipeline as it runs today, and draw faster.",
)
@click.option(
    "--int8",
    type=click.Choice(["bundle", "torch"]),
    default="bundle",
    show_default=True,
    help="What runs INT8: the bundle, or the torch model with its scales and modes.",
)
@click.option(
    "--batch", type=click.IntRange(1, 256), default=64, show_default=True, help="Samples drawn at once, at most."
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder of finished shards; in the user's cache by default."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("evaluation.json"), show_default=True)
@_speaking
def evaluate(bundle: Path, work: Path | None, output: Path, out: Output, **request: Any) -> None:
    """Measure the quality of BUNDLE's samples: PSNR, SSIM, FID, KID, IS, precision, recall.

    Goes on where it was when it was killed. Under torchrun, the processes share the work.
    """
    from trtconvert.cache import default_folder
    from trtconvert.calib.distributed import joined_ranks
    from trtconvert.evaluate import evaluation
    from trtconvert.evaluate.table import print_evaluation
    from trtconvert.files import require_writable, whole_file

    instead = "give another file with -o"
    require_writable(output, instead)
    with joined_ranks() as ranks:
        if ranks.rank > 0:
            out.silence()
        found = evaluation.evaluate(
            bundle, evaluation.Request(**request), work or default_folder() / "evaluate", ranks, out.reporter()
        )
    if found is not None:
        with whole_file(output, instead) as partial:
            partial.write_text(found.model_dump_json(indent=1))
        out.result(
            {"output": output, "evaluation": found.model_dump(mode="json")},
            f"written to {output}; `trtconvert report {bundle} --evaluation {output}` shows it",
            show=lambda console: print_evaluation(console, found),
        )


def _calibration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of the commands that override a recipe's calibration data."""
    options = (
        click.argument("recipe", type=click.Path(path_type=Path)),
        click.option("--data", help="Instead of the recipe's calibration.data; see `trtconvert schema`."),
        click.option("-n", "--samples", type=click.IntRange(1), help="Instead of the recipe's calibration.samples."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _with_data(path: Path, data: str | None, samples: int | None, report: Reporter) -> Recipe:
    """The recipe, with the calibration data of the command line."""
    from pydantic import ValidationError

    from trtconvert.recipe import CalibrationSection

    recipe = _recipe(path, report)
    given = {"data": data, "samples": samples}
    changed = recipe.calibration.model_dump() | {name: value for name, value in given.items() if value is not None}
    try:
        section = CalibrationSection.model_validate(changed)
    except ValidationError as error:
        raise UserError(
            "the recipe and the command line do not fit together",
            expected=error.errors()[0]["msg"].removeprefix("Value error, "),
            got=", ".join(f"--{name} {value}" for name, value in given.items() if value is not None),
            remedy="change the recipe's calibration section or leave the option out",
        ) from error
    return recipe.model_copy(update={"calibration": section})


@main.command()
@_calibration_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("calibration.safetensors"), show_default=True
)
@click.option(
    "--cache", "cache_folder", type=click.Path(path_type=Path), help="Folder for finished batches until the end."
)
@click.option("--skip-bad", is_flag=True, help="Leave bad samples out, and list them.")
@_DEVICE
@_OFFLOAD
@_speaking
def calibrate(
    recipe: Path,
    data: str | None,
    samples: int | None,
    output: Path,
    cache_folder: Path | None,
    skip_bad: bool,
    device: str | None,
    offload: bool,
    out: Output,
) -> None:
    """Calibrate the model of RECIPE and write its scales, for `calibration: {from: FILE}` in recipes.

    Goes on where it was when it was killed. Under torchrun, the processes share the work.
    """
    from trtconvert.cache import Cache, default_folder
    from trtconvert.calib.command import calibrate_recipe, summary
    from trtconvert.calib.distributed import joined_ranks

    chosen = _on(device, offload, _with_data(recipe, data, samples, out.reporter()))
    cache = Cache(cache_folder or default_folder())
    with joined_ranks() as ranks:
        if ranks.rank > 0:
            out.silence()
        made = calibrate_recipe(chosen, output, cache, ranks, out.reporter(), skip_bad=skip_bad)
    made_of = made.provenance
    out.result(
        {
            "output": output,
            "model": made_of.model,
            "sites": len(made.tables),
            "layers": len(made.layers),
            "observed": made_of.observed,
            "skipped": made_of.skipped,
        },
        *summary(made),
        f"written to {output}",
    )


@main.command()
@_calibration_options
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("inputs.safetensors"), show_default=True)
@click.option("--per-run", type=click.IntRange(1), default=4, show_default=True, help="Steps recorded of each run.")
@_speaking
def record(recipe: Path, data: str | None, samples: int | None, output: Path, per_run: int, out: Output) -> None:
    """Record denoiser inputs of RECIPE's model at stratified timesteps, with the step before each.

    The file serves as calibration data.
    """
    from trtconvert import models
    from trtconvert.calib import record as recording
    from trtconvert.files import whole_file
    from trtconvert.models.identity import identity

    report = out.reporter()
    chosen = _with_data(recipe, data, samples, report)
    if output.suffix != ".safetensors":
        raise UserError(
            f"inputs are not written as '{output.name}'",
            expected="a file that ends in .safetensors",
            got=output.suffix or "no ending",
            remedy="give another file with -o",
        )
    with whole_file(output, "give another file with -o") as partial, report.live(), report.stage("record") as bar:
        model = models.load(chosen.model, chosen.loras)
        weights = identity(chosen.model, chosen.loras)
        rows = recording.record(model, chosen.calibration, per_run, weights, partial, bar)
    out.result(
        {"output": output, "model": model.name, "inputs": rows}, f"{rows} inputs of {model.name} written to {output}"
    )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--evaluation", type=click.Path(path_type=Path), help="What `trtconvert evaluate` wrote.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@_speaking
def report(bundle: Path, evaluation: Path | None, output: Path, out: Output) -> None:
    """Show BUNDLE as one HTML file: gates, samples, quality, precision and scales per site and timestep."""
    from trtconvert.evaluate.report import write_report

    write_report(bundle, evaluation, output)
    out.result({"output": output}, f"report of {bundle}: {output}")


@main.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("comparison.html"), show_default=True)
@_speaking
def compare(first: Path, second: Path, output: Path, out: Output) -> None:
    """Show two bundles side by side as one HTML file: figures, speed, samples, and what their recipes say differently."""
    from trtconvert.evaluate.comparison import write_comparison

    sides = write_comparison(first, second, output)
    out.result({"output": output, "bundles": sides}, f"{first} and {second}: {output}")


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("kernel_cost.json"), show_default=True)
@_speaking
def measure(output: Path, out: Output) -> None:
    """Measure attention, layers and convolutions on this machine's GPU, for `plan: {kernel_cost: FILE}` in recipes."""
    from trtconvert.calib.measure import steps, write_kernel_cost
    from trtconvert.files import whole_file

    reporter = out.reporter()
    with whole_file(output, "give another file with -o") as partial, reporter.live(), reporter.stage("measure") as bar:
        bar.total(steps())
        write_kernel_cost(partial, bar.step)
    out.result({"output": output}, f"written to {output}")


@main.command()
@_speaking
def doctor(out: Output) -> None:
    """Tell what this machine can build and run, and what is missing."""
    from dataclasses import asdict

    from trtconvert.doctor import examine, print_findings

    found = examine()
    out.result(
        {"findings": [asdict(finding) for finding in found]}, show=lambda console: print_findings(console, found)
    )


@main.command()
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("recipe.yaml"), show_default=True)
@click.option("--prompts", type=click.Path(path_type=Path), help="Text file with a prompt a line, to calibrate on.")
@click.option(
    "--lora", "loras", multiple=True, type=click.Path(path_type=Path), help="LoRA file to merge; may be given again."
)
@click.option("--force", is_flag=True, help="Write over a recipe that is there.")
def init(model: str, output: Path, prompts: Path | None, loras: tuple[Path, ...], force: bool) -> None:
    """Write a commented recipe for MODEL.

    That is the folder of a diffusers pipeline, a file of weights, an ONNX file, or a model by its short name: a published one, as
    sdxl or flux1, or digits-dit, which comes with the program. Another name lists them.
    """
    from trtconvert.files import whole_file
    from trtconvert.starter import assumptions, recipe_text

    text = recipe_text(model, output, prompts, loras)
    if output.exists() and not force:
        raise UserError(
            f"{output} is there already",
            expected="a file that is not",
            got="one",
            remedy="name another with -o, or write over it with --force",
        )
    with whole_file(output, "name another with -o") as partial:
        partial.write_text(text, encoding="utf-8")
    for assumed in assumptions(text):
        click.echo(f"assumed: {assumed}")
    click.echo(f"{output}: look through it, then `trtconvert build {output}`")


_strategy = click.option(
    "--strategy",
    type=click.Choice(["names", "kandinsky"]),
    default="names",
    show_default=True,
    help="What tells embeddings and last layers: their names; or their place in the model, of Kandinsky and others with blocks. "
    "The latter leaves these and the VAE's decoder as they are.",
)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("analysis.json"), show_default=True)
@_strategy
@_speaking
def analyze(model: Path, output: Path, strategy: Any, out: Output) -> None:
    """Tell what INT8 would do to each tensor of MODEL: a file of weights, a folder of them, or a pipeline's folder.

    Writes JSON for `trtconvert quantize --analysis`, which `trtconvert schema analysis` describes, and a page for people.
    """
    from trtconvert.evaluate.weights_page import write_page
    from trtconvert.files import require_writable, whole_file
    from trtconvert.weights.analysis import Rules, analyse
    from trtconvert.weights.sources import open_source
    from trtconvert.weights.tables import print_analysis

    instead = "give another file with -o"
    page = output.with_suffix(".html")
    if output.suffix != ".json":
        raise UserError(
            f"an analysis is not written as '{output.name}'",
            expected="a file that ends in .json; the page beside it ends in .html",
            got=output.suffix or "no ending",
            remedy=instead,
        )
    source = open_source(model)
    for place in (output, page):
        require_writable(place, instead)
    report = out.reporter()
    with report.live(), report.stage("analyze") as bar:
        found = analyse(source, bar, Rules(strategy=strategy))
    with whole_file(output, instead) as partial:
        partial.write_text(found.model_dump_json(indent=1), encoding="utf-8")
    write_page(found, page)
    out.result(
        {
            "output": output,
            "page": page,
            "tensors": len(found.tensors),
            "parameters": found.parameters,
            "parameters_int8": found.in_int8,
            "bytes": found.bytes,
            "bytes_after": found.bytes_after,
        },
        f"written to {output} and {page}",
        show=lambda console: print_analysis(console, found),
    )


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder, which is not there or empty."
)
@click.option("--analysis", type=click.Path(path_type=Path), help="What `trtconvert analyze` wrote of MODEL.")
@click.option(
    "--granularity",
    type=click.Choice(["block", "channel"]),
    default="block",
    show_default=True,
    help="A scale per 128 × 128 weights, or per output channel as engines have.",
)
@click.option(
    "--fallback-dtype",
    "fallback",
    type=click.Choice(["bf16", "fp16"]),
    default="bf16",
    show_default=True,
    help="Of what is neither INT8 nor FP32.",
)
@click.option(
    "--fp32",
    multiple=True,
    metavar="PATTERN",
    help="Names that stay FP32, beside norms, embeddings and final layers; may be given again.",
)
@click.option(
    "--max-outliers",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Share of a weight's elements over four times the root mean square of their block.",
)
@click.option(
    "--min-elements", type=click.IntRange(0), default=4096, show_default=True, help="Smaller weights are not INT8."
)
@_strategy
@_speaking
def quantize(model: Path, output: Path, analysis: Path | None, out: Output, **rules: Any) -> None:
    """Write MODEL with its weights in INT8, and everything else that its folder has.

    Takes no more memory than the largest tensor needs, reads back what it wrote, and goes on where it was when it was killed.
    """
    from trtconvert.weights.analysis import Rules
    from trtconvert.weights.quantisation import quantise_model
    from trtconvert.weights.sources import open_source
    from trtconvert.weights.tables import outcome_values, print_outcome

    if math.isnan(rules["max_outliers"]):  # in no range, and click takes it
        raise UserError("--max-outliers is no share", expected="0 to 1", got="nan", remedy="give a number")
    report = out.reporter()
    source = open_source(model)
    with report.live(), report.stage("quantize") as bar:
        outcome = quantise_model(source, output, Rules(**rules), analysis, bar)
    before = sum(tensor.nbytes for tensor in source.tensors)
    out.result(outcome_values(outcome, before), show=lambda console: print_outcome(console, outcome, before))


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder, which is not there or empty."
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16"]),
    help="Of what was converted; by default what each tensor was before, and bf16 where that had not 16 bits.",
)
@_speaking
def dequantize(model: Path, output: Path, dtype: Any, out: Output) -> None:
    """Write MODEL, which `trtconvert quantize` made, in 16 bits again."""
    from trtconvert.weights.quantisation import dequantise_model
    from trtconvert.weights.sources import open_source
    from trtconvert.weights.tables import outcome_values, print_outcome

    report = out.reporter()
    source = open_source(model)
    with report.live(), report.stage("dequantize") as bar:
        outcome = dequantise_model(source, output, dtype, bar)
    before = sum(tensor.nbytes for tensor in source.tensors)
    out.result(outcome_values(outcome, before), show=lambda console: print_outcome(console, outcome, before))


def _replicas(text: str) -> tuple[int | None, int | None]:
    """The least and the most replicas that `--replicas` names; None for as many as there are GPUs.

    Raises:
        UserError: it names none.
    """
    if text == "auto":
        return None, None
    least, colon, most = text.partition(":")
    parts = (least, most) if colon else (least, least)
    if all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts) and 1 <= int(parts[0]) <= int(
        parts[1]
    ):
        return int(parts[0]), int(parts[1])
    raise UserError(
        "--replicas is no number of replicas",
        expected="auto, a number from 1, or LEAST:MOST",
        got=text,
        remedy="correct the option",
    )


def _at_most(option: str, number: int, other: str, most: int) -> None:
    """
    Raises:
        UserError: one option is above another.
    """
    if number > most:
        raise UserError(
            f"{option} is more than {other}",
            expected=f"at most {most}",
            got=str(number),
            remedy=f"lower it, or raise {other}",
        )


def _finite(*numbers: float) -> None:
    """
    Raises:
        UserError: one is infinite or nan, which is in no range and click takes.
    """
    if bad := [number for number in numbers if not math.isfinite(number)]:
        raise UserError(
            "an option is no number of seconds or cores", expected="a number", got=str(bad[0]), remedy="correct it"
        )


_MAX_BATCH = click.option(
    "--max-batch", type=click.IntRange(1, 64), default=8, show_default=True, help="Images drawn at once, at most."
)
_DEFAULT_STEPS = click.option(
    "--steps", type=click.IntRange(1), default=50, show_default=True, help="Denoising steps by default."
)


@main.command("serve")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 for all. There is no login."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--name", help="Of the model, for clients; the bundle's folder by default.")
@click.option("--address", help="Ray cluster, as auto or HOST:PORT; one of this machine alone by default.")
@click.option(
    "--replicas",
    default="auto",
    show_default=True,
    metavar="auto|N|LEAST:MOST",
    help="One per GPU, so many, or as many as there is work for.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="cuda: a GPU for each replica; cpu: ONNX Runtime. auto takes cuda where the cluster has GPUs.",
)
@click.option(
    "--cpus", type=click.FloatRange(0, 1024), default=1, show_default=True, help="Cores set aside for each replica."
)
@_MAX_BATCH
@click.option(
    "--batch-wait-ms",
    type=click.FloatRange(0, 60_000),
    default=10,
    show_default=True,
    help="How long an image waits for others of its shape while a replica is free.",
)
@click.option(
    "--queue-limit",
    type=click.IntRange(1, 100_000),
    default=64,
    show_default=True,
    help="Images asked for and not answered; more get status 429.",
)
@click.option(
    "--max-images", type=click.IntRange(1, 100), default=10, show_default=True, help="n of a request, at most."
)
@_DEFAULT_STEPS
@click.option(
    "--max-steps", type=click.IntRange(1), default=100, show_default=True, help="steps of a request, at most."
)
@click.option(
    "--start-seconds",
    type=click.FloatRange(1),
    default=900,
    show_default=True,
    help="In which a replica has to be there.",
)
@click.option(
    "--request-seconds", type=click.FloatRange(0.1), default=600, show_default=True, help="That a request may take."
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    help="In which requests are finished after SIGTERM or Ctrl-C.",
)
@click.pass_context
def serve_command(
    context: click.Context,
    bundle: Path,
    host: str,
    port: int,
    name: str | None,
    address: str | None,
    replicas: str,
    device: Any,
    cpus: float,
    max_batch: int,
    batch_wait_ms: float,
    queue_limit: int,
    max_images: int,
    steps: int,
    max_steps: int,
    start_seconds: float,
    request_seconds: float,
    drain_seconds: float,
) -> None:
    """Serve BUNDLE over HTTP, as the OpenAI images API does, with replicas on a Ray cluster. See docs/serving.md.

    Needs the extra `serve`. There is no login and no encryption: put a proxy in front of it.
    """
    from trtconvert.serving.server import Limits, Options, require_packages, serve

    require_packages()
    from trtconvert.serving.cluster import Placement

    _at_most("--steps", steps, "--max-steps", max_steps)
    _at_most("--max-images", max_images, "--queue-limit", queue_limit)
    _finite(cpus, batch_wait_ms, start_seconds, request_seconds, drain_seconds)
    least, most = _replicas(replicas)
    limits = Limits(name or bundle.resolve().name, max_images, steps, max_steps)
    options = Options(host, port, limits, max_batch, batch_wait_ms / 1000, queue_limit, request_seconds, drain_seconds)
    placement = Placement(address, least, most, device, cpus, start_seconds)
    context.exit(serve(bundle, options, placement, lambda line: click.echo(line)))


@main.command("export-triton")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the model repository.")
@click.option("--name", help="Of the model; the bundle's folder by default. Its components are called NAME-COMPONENT.")
@_MAX_BATCH
@click.option(
    "--batch-wait-ms",
    type=click.FloatRange(0, 60_000),
    default=10,
    show_default=True,
    help="How long Triton waits for others.",
)
@click.option(
    "--queue-limit", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Requests that wait, at most."
)
@_DEFAULT_STEPS
@click.option(
    "--max-steps", type=click.IntRange(1), default=100, show_default=True, help="STEPS of a request, at most."
)
@click.option("--force", is_flag=True, help="Replace models of these names.")
def export_triton_command(
    bundle: Path,
    output: Path,
    name: str | None,
    max_batch: int,
    batch_wait_ms: float,
    queue_limit: int,
    steps: int,
    max_steps: int,
    force: bool,
) -> None:
    """Write BUNDLE into a model repository for NVIDIA Triton Inference Server. See docs/triton.md."""
    from trtconvert.serving.triton import Settings, export_triton

    _at_most("--steps", steps, "--max-steps", max_steps)
    _finite(batch_wait_ms)
    wait = round(batch_wait_ms * 1000)
    settings = Settings(name or bundle.resolve().name, max_batch, wait, queue_limit, steps, max_steps)
    for line in export_triton(bundle, output, settings, force=force):
        click.echo(line)


@main.command()
@click.argument("of", type=click.Choice(["recipe", "analysis", "events"]), default="recipe")
def schema(of: str) -> None:
    """Print the JSON schema of recipes, for editors, of what `trtconvert analyze` writes, or of a line of progress (--json)."""
    import json

    from trtconvert.recipe import json_schema

    if of == "analysis":
        from trtconvert.weights.analysis import Analysis

        click.echo(json.dumps(Analysis.model_json_schema(), indent=2))
    elif of == "events":
        from trtconvert.progress import events_schema

        click.echo(json.dumps(events_schema(), indent=2))
    else:
        click.echo(json.dumps(json_schema(), indent=2, default=str))


main.add_command(commands(_speaking))

if __name__ == "__main__":
    main()
