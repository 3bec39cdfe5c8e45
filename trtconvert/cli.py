"""The command line. Each command imports its modules when it runs, so that `--help` answers at once."""

from __future__ import annotations

from trtconvert import early

# isort: split
import contextlib
import errno
import functools
import gc
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
from trtconvert.errors import TrtconvertError, UserError, first_problem, kind_and_first_line
from trtconvert.modiff.commands import commands

if TYPE_CHECKING:
    from trtconvert.cache import Cache
    from trtconvert.diffusion_model import Sampler
    from trtconvert.progress import Output, Reporter
    from trtconvert.recipe import Recipe
    from trtconvert.runtime import LoadedBundle


_PATH = click.Path(path_type=Path)
_BUNDLE = click.argument("bundle", type=_PATH)
_RECIPE = click.argument("recipe", type=_PATH)
_CACHE = click.option("--cache", "cache_folder", type=_PATH, help="Folder of the build cache.")
_DATA = click.option("--data", help="Replaces the recipe's calibration.data; see `trtconvert schema`.")
_SAMPLES = click.option("-n", "--samples", type=click.IntRange(1), help="Replaces the recipe's calibration.samples.")
_OTHER_FILE = "give another file with -o"


class _FiniteRange(click.FloatRange):
    """Refuses infinity and nan, which click's range accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            assert param is not None  # click passes None for values of no option
            raise UserError(
                f"{param.opts[0]} is not a number",
                expected="a finite number",
                got=str(number),
                remedy="correct the option",
            )
        return number


def _output(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("-o", "--output", type=_PATH, default=Path(default))


def _require_suffix(output: Path, suffix: str, what: str) -> None:
    given = output.suffix.lower() if suffix == ".png" else output.suffix  # readers of other files compare exactly
    if given != suffix:
        raise UserError(
            f"{what} cannot be written as '{output.name}'",
            expected=f"a file that ends in {suffix}",
            got=output.suffix or "no ending",
            remedy=_OTHER_FILE,
        )


class _Stopped(KeyboardInterrupt):
    """A signal asked the program to stop.

    A plain KeyboardInterrupt does not do: after it crossed code that a library compiles during an import, Python ends by SIGINT
    and ignores the exit code.
    """


def _importing() -> bool:
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _out_of_host_memory(error: MemoryError) -> TrtconvertError:
    return TrtconvertError(
        "the host's memory ran out",
        expected="memory for the model, and for three engines of its size while a build compares engines",
        got=kind_and_first_line(error),
        remedy="end other programs or add memory; or set engine.attention to plugin or native, which builds a single engine",
    )


_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of the system for paths that the user chose."""


def _refused_path(error: OSError) -> UserError:
    return UserError(
        f"{error.filename} cannot be used",
        expected="a path that this user may read, or write if it is an output",
        got=str(error.strerror),
        remedy="correct the path, give another one, or change its permissions",
    )


def _start_in_utf8() -> None:
    """Restarts Python in UTF-8 mode if its file system encoding is ASCII.

    C++ libraries open paths in UTF-8, and tables hold characters beyond ASCII.
    """
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


_CLEARING_SECONDS = 2.0
"""Time to remove temporary folders; further signals are ignored meanwhile."""


class _Commands(click.Group):
    """Turns every failure into a message and an exit code.

    The exit code is 2 for a user's mistake, 1 for a failure of the program, and 128 + N after signal N.
    """

    stopped_by: int | None = None
    as_json = False  # whether the running command prints errors as lines of JSON
    _left_at = -math.inf  # in seconds of time.monotonic()

    def main(self, args: Sequence[str] | None = None, *more: Any, **named: Any) -> Any:
        if args is not None:
            return super().main(args, *more, **named)
        # The shell called the command, in a process of its own.
        _start_in_utf8()
        # Imports and exports make millions of objects that stay: Python would search them for garbage again and again.
        gc.set_threshold(100_000, 20, 20)
        try:
            return super().main(None, *more, **named)
        except SystemExit as end:
            early.leave(end.code if isinstance(end.code, int) else int(end.code is not None))

    def stop(self, number: int, _frame: object) -> None:
        """Handles SIGINT and SIGTERM: raises an exception, so that temporary folders are removed.

        Signals during `_CLEARING_SECONDS` are ignored, so that the removal completes. During an import SIGALRM calls this again
        a little later: libraries import modules from C++ code, which aborts the process at an exception.
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
        """Returns whether a signal asked the program to stop. Callers must exit when this returns True."""
        if self.stopped_by is not None:
            self._left_at = time.monotonic()
        return self.stopped_by is not None

    def invoke(self, ctx: click.Context) -> Any:
        self.stopped_by, self._left_at, self.as_json = None, -math.inf, False
        # Signals that the process ignores stay ignored: background jobs ignore Ctrl-C.
        heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        before = {n: signal.signal(n, self.stop) for n in (*heeded, signal.SIGALRM)}
        try:
            return super().invoke(ctx)
        except (click.exceptions.ClickException, click.exceptions.Exit, click.exceptions.Abort):
            raise
        except BrokenPipeError:
            raise  # the reader of a pipe exited; click ends quietly
        except KeyboardInterrupt as interrupt:
            self._end_stopped(interrupt)
        except Exception as error:
            if self.was_stopped():
                # A library that was being imported turned the interrupt into an error of its own.
                self._end_stopped(KeyboardInterrupt())
            if ctx.params["debug"]:
                traceback.print_exc()
            if isinstance(error, MemoryError):
                error = _out_of_host_memory(error)
            if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
                error = _refused_path(error)
            code = error.exit_code if isinstance(error, TrtconvertError) else 1
            if self.as_json:
                self._tell(error, code)
            if isinstance(error, TrtconvertError):
                click.echo(f"error: {error}", err=True)
                sys.exit(code)
            click.echo(f"internal error: {kind_and_first_line(error)}", err=True)
            click.echo("  remedy: this is a bug of trtconvert; please report it with the output of --debug", err=True)
            sys.exit(1)
        finally:
            if self.stopped_by is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            # A program that calls this one gets its own handlers back.
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: the handler was not Python's

    def _end_stopped(self, interrupt: KeyboardInterrupt) -> NoReturn:
        code = 128 + (self.stopped_by or signal.SIGINT)
        if self.as_json:
            self._tell(interrupt, code)
        click.echo("interrupted: the cache keeps finished stages, and half-written files were removed", err=True)
        sys.exit(code)

    def _tell(self, error: BaseException, code: int) -> NoReturn:
        from trtconvert.progress import failure, write_event

        write_event(failure(error, code))
        sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="trtconvert")
@click.option("--debug", is_flag=True, help="Print tracebacks, and why calls are not captured in CUDA graphs.")
def main(debug: bool) -> None:
    """Turn diffusion models into TensorRT engines with INT8 attention that follows the denoising timestep."""
    from trtconvert.entry_point import look_in

    if debug:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("trtconvert").setLevel(logging.DEBUG)

    look_in(Path())


def _speaking(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --quiet and --json to a command, which prints through its argument `out`."""

    @click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print the result as a JSON object, and progress and errors as lines of JSON to stderr.",
    )
    @functools.wraps(command)
    def wrapped(quiet: bool, as_json: bool, **named: Any) -> None:
        from trtconvert.progress import Output

        if quiet and as_json:
            raise UserError(
                "--quiet and --json exclude each other",
                expected="one of them",
                got="both",
                remedy="leave --quiet out: with --json, stdout holds the result alone",
            )
        main.as_json = as_json
        out = Output("json" if as_json else "quiet" if quiet else "text", main.was_stopped)
        with out.kept_clean():
            command(out=out, **named)

    return wrapped


_DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where the model computes; replaces the recipe's compute.device. auto: the GPU, if the model fits as a whole or block "
    "by block.",
)
_OFFLOAD = click.option(
    "--offload",
    is_flag=True,
    help="Keep the torch model's weights in host memory and copy them to the GPU block by block. By default models that do not "
    "fit otherwise are offloaded; see compute.offload in recipes.",
)


def _on(device: str | None, offload: bool, recipe: Recipe) -> Recipe:
    asked = ({} if device is None else {"device": device}) | ({"offload": "on"} if offload else {})
    return recipe.model_copy(update={"compute": recipe.compute.model_copy(update=asked)})


_FIRST_TO_END = 0.5
"""Seconds that rank 0 has for printing its error."""


@main.command()
@_RECIPE
@click.option("-o", "--output", type=_PATH, help="Folder of the bundle; out/NAME by default.")
@_CACHE
@click.option("--no-cache", is_flag=True, help="Run every stage, and cache no stage.")
@click.option("--skip-bad", is_flag=True, help="Skip bad calibration samples, and list them.")
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
    """Convert the model of RECIPE and write a bundle.

    RECIPE may also be an ONNX file or digits-dit. An ONNX file is built with the recipe of `trtconvert init`; digits-dit is a
    small model that comes with the program. Under torchrun, the processes share the samples.
    """
    from trtconvert import pipeline, summary
    from trtconvert.calib.distributed import Crew, LeaderFailed, joined_ranks

    output = output or Path("out") / recipe.stem
    with joined_ranks() as ranks:
        crew = Crew(ranks)
        if ranks.rank > 0:
            out.silence()
            try:
                pipeline.assist(crew, out.reporter())
            except LeaderFailed as failed:
                # torchrun sends SIGTERM to all processes when one has ended: rank 0 ends first, and this one without a message.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(_FIRST_TO_END)
                sys.exit(failed.exit_code)
            return
        report = out.reporter()
        with crew.leading(), _cache(cache_folder, no_cache) as cache:
            loaded = _on(device, offload, _recipe(recipe, report))
            outcome = pipeline.build(loaded, output, cache, report, skip_bad=skip_bad, crew=crew)
    out.result(
        {"bundle": outcome.folder, **_times(report), "manifest": outcome.manifest.model_dump(mode="json")},
        show=lambda _: summary.print_build(outcome, report),
    )


def _times(report: Reporter) -> dict[str, Any]:
    seconds = {name: round(seconds, 3) for name, seconds in report.seconds.items()}
    sizes = {"bytes": report.bytes, "gpu_bytes": report.gpu_bytes}
    return {"seconds": seconds, "reused": sorted(report.reused), **sizes}


def _recipe(path: Path, report: Reporter) -> Recipe:
    """Loads a recipe, the recipe that comes with the program under this name, or the default recipe of an ONNX file.

    Args:
        report: gets a notice of the assumptions about an ONNX file.
    Raises:
        UserError: the recipe does not exist or is not valid.
    """
    from trtconvert.recipe import ONNX_SUFFIX, load_recipe
    from trtconvert.starter import assumptions, named_recipe, recipe_of

    if path.suffix != ONNX_SUFFIX:
        return load_recipe(path if path.exists() else named_recipe(path))
    with recipe_of(path) as file:
        if assumed := assumptions(file.read_text(encoding="utf-8")):
            report.notice(
                f"assumed of {path.name}: {', '.join(assumed)}; `trtconvert init` writes a recipe that you can correct"
            )
        return load_recipe(file)


@contextlib.contextmanager
def _cache(folder: Path | None, disabled: bool) -> Iterator[Cache]:
    from trtconvert.cache import Cache, default_folder
    from trtconvert.files import temporary_folder

    if disabled:
        with temporary_folder() as name:
            yield Cache(name / "cache")  # `temporary_folder` locks `name`, and the cache locks its own folder
    else:
        yield Cache(folder or default_folder())


@main.command("compile")
@_BUNDLE
@_CACHE
@click.option("--no-cache", is_flag=True, help="Build every engine again, and cache no engine.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="engine.FIELD=VALUE",
    help="Replaces a field of the bundle's recipe, for example engine.attention=native; may be given again for other fields. The "
    "bundle keeps the new value.",
)
@_speaking
def compile_command(
    bundle: Path, cache_folder: Path | None, no_cache: bool, changes: tuple[str, ...], out: Output
) -> None:
    """Build the TensorRT engine for this machine's GPU into BUNDLE. Needs no model code and no calibration.

    Takes engines that an earlier call has finished from the cache. If an engine cannot be built, for example for lack of memory,
    --set changes the recipe: engine.attention, engine.workspace_mb, engine.shapes and others.
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
        show=lambda console: console.print(summary.manifest_table(manifest, bundle)),
    )


@main.command()
@_BUNDLE
@_speaking
def inspect(bundle: Path, out: Output) -> None:
    """Check every file of BUNDLE and show its content. With --json, print its manifest."""
    from trtconvert import summary
    from trtconvert.bundle import Manifest, check_files, read_unchanged

    def shown(manifest: Manifest) -> Any:
        check_files(bundle, manifest)
        return manifest.model_dump(mode="json"), summary.manifest_table(manifest, bundle)

    values, table = read_unchanged(bundle, shown)
    out.result(values, show=lambda console: console.print(table))


@main.command()
@_BUNDLE
@_output("samples.png")
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    help="Prompt of a sample; several prompts take turns. For bundles with components.",
)
@click.option("-n", "--samples", type=click.IntRange(1, 1024), help="One per prompt by default, or 16.")
@click.option("--steps", type=click.IntRange(1), default=50)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1025), default=0, help="Seed of the first sample.")
@click.option(
    "--weights",
    type=_PATH,
    help="Weights of the model that BUNDLE was made from, for samplers that need more than the denoiser.",
)
@click.option("--devices", help="GPUs that share the samples of each call, for example cuda:0,cuda:1.")
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
    """Draw samples with BUNDLE on this machine's GPU, or with ONNX Runtime."""
    from trtconvert import runtime
    from trtconvert.bundle import MANIFEST
    from trtconvert.documents import text_flaw
    from trtconvert.evaluate.grid import save_sheet
    from trtconvert.files import whole_file
    from trtconvert.runtime.batches import AnyBatch

    _require_suffix(output, ".png", "samples")
    for prompt in prompts:
        if flaw := text_flaw(prompt):
            raise UserError(
                "a prompt is not text",
                expected=f"characters of {sys.getfilesystemencoding()}, the encoding of the command line",
                got=flaw,
                remedy="type the prompt again in the encoding of the terminal; a prompt from a file must be UTF-8",
            )
    started = time.perf_counter()
    loaded = runtime.load(bundle, devices=None if devices is None else [name.strip() for name in devices.split(",")])
    place, folder = output.resolve(), loaded.folder.resolve()
    taken = {(loaded.folder / name).resolve() for name in (MANIFEST, *loaded.manifest.files)}
    if place in taken or (place.is_relative_to(folder) and loaded.manifest.is_own(str(place.relative_to(folder)))):
        raise UserError(
            f"{output} would change the bundle",
            expected="a file that does not belong to the bundle",
            got=str(output),
            remedy=_OTHER_FILE,
        )
    # Samplers choose a prompt by the seed: the first sample should show the first prompt.
    first = seed % max(1, len(prompts))
    draw = _sampler(loaded, prompts[-first:] + prompts[:-first], weights)
    samples, loading = samples or len(prompts) or 16, time.perf_counter() - started
    with whole_file(output, _OTHER_FILE) as partial:
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
    """Returns the sampler of a bundle's model.

    Raises:
        UserError: the sampler needs weights that were not given, takes none, or takes others than the given ones.
    """
    from trtconvert import models

    if weights is None or (prompts and not bundle.manifest.pipeline):
        return models.load_sampler(bundle, prompts)
    if bundle.manifest.pipeline:
        return models.load_sampler(bundle, prompts, weights)
    from trtconvert.evaluate.evaluation import full_precision

    model = full_precision(bundle, weights)
    assert model is not None  # because weights were given
    return model.sample


@main.command()
@_BUNDLE
@click.option("--weights", type=_PATH, help="Weights of the full-precision model for the comparison.")
@click.option("-n", "--samples", type=click.IntRange(10), default=10_000)
@click.option("--steps", type=click.IntRange(1), default=100)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim")
@click.option("--seed", type=click.IntRange(0, 2**62), default=100_000, help="Seed of the first sample.")
@click.option(
    "--features",
    help="digits-classifier, emoji-classifier, inception, or package.module:function; default: that of a shipped model.",
)
@click.option("--features-weights", type=_PATH, help="Weights of the feature extractor.")
@click.option(
    "--reference",
    help="digits or emoji (held-out images), or a folder of images; default: the images of a shipped model.",
)
@click.option("--lpips-weights", type=_PATH, help="torchvision's AlexNet weights; adds LPIPS.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device of the torch model and of the feature extractor. auto: the GPU, if there is one and the model fits.",
)
@_OFFLOAD
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    help="Type of the full-precision model. 16 bits compare with the pipeline as it usually runs, and draw faster.",
)
@click.option(
    "--int8",
    type=click.Choice(["bundle", "torch"]),
    default="bundle",
    help="Draw the INT8 samples with the bundle, or with the torch model and the bundle's scales and modes.",
)
@click.option("--batch", type=click.IntRange(1, 256), default=64, help="Largest number of samples of a batch.")
@click.option("--work", type=_PATH, help="Folder of finished shards; default: in the user's cache.")
@_output("evaluation.json")
@_speaking
def evaluate(bundle: Path, work: Path | None, output: Path, out: Output, **request: Any) -> None:
    """Measure the quality of BUNDLE's samples: PSNR, SSIM, FID, KID, IS, precision, recall.

    A killed evaluation resumes with its finished shards. Under torchrun, the processes share the work.
    """
    from trtconvert.cache import default_folder
    from trtconvert.calib.distributed import joined_ranks
    from trtconvert.evaluate import evaluation
    from trtconvert.evaluate.table import print_evaluation
    from trtconvert.files import require_writable, whole_file

    require_writable(output, _OTHER_FILE)
    with joined_ranks() as ranks:
        if ranks.rank > 0:
            out.silence()
        found = evaluation.evaluate(
            bundle, evaluation.Request(**request), work or default_folder() / "evaluate", ranks, out.reporter()
        )
    if found is not None:
        with whole_file(output, _OTHER_FILE) as partial:
            partial.write_text(found.model_dump_json(indent=1))
        out.result(
            {"output": output, "evaluation": found.model_dump(mode="json")},
            f"written to {output}; `trtconvert report {bundle} --evaluation {output}` shows it",
            show=lambda console: print_evaluation(console, found),
        )


def _with_data(path: Path, data: str | None, samples: int | None, report: Reporter) -> Recipe:
    from pydantic import ValidationError

    from trtconvert.recipe import CalibrationSection

    recipe = _recipe(path, report)
    given = {"data": data, "samples": samples}
    changed = recipe.calibration.model_dump() | {name: value for name, value in given.items() if value is not None}
    try:
        section = CalibrationSection.model_validate(changed)
    except ValidationError as error:
        raise UserError(
            "the command line does not fit the recipe",
            expected=first_problem(error),
            got=", ".join(f"--{name} {value}" for name, value in given.items() if value is not None),
            remedy="change the recipe's calibration section or leave the option out",
        ) from error
    return recipe.model_copy(update={"calibration": section})


@main.command()
@_RECIPE
@_DATA
@_SAMPLES
@_output("calibration.safetensors")
@click.option("--cache", "cache_folder", type=_PATH, help="Folder of finished batches while the command runs.")
@click.option("--skip-bad", is_flag=True, help="Skip bad samples, and list them.")
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

    A killed calibration resumes with its finished batches. Under torchrun, the processes share the work.
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
@_RECIPE
@_DATA
@_SAMPLES
@_output("inputs.safetensors")
@click.option("--per-run", type=click.IntRange(1), default=4, help="Recorded steps of each run.")
@_speaking
def record(recipe: Path, data: str | None, samples: int | None, output: Path, per_run: int, out: Output) -> None:
    """Record denoiser inputs of RECIPE's model at stratified timesteps, each with the step before, as calibration data."""
    from trtconvert import models
    from trtconvert.calib import record as recording
    from trtconvert.files import whole_file
    from trtconvert.models.identity import identity

    report = out.reporter()
    chosen = _with_data(recipe, data, samples, report)
    _require_suffix(output, ".safetensors", "inputs")
    with whole_file(output, _OTHER_FILE) as partial, report.live(), report.stage("record") as bar:
        model = models.load(chosen.model, chosen.loras)
        weights = identity(chosen.model, chosen.loras)
        rows = recording.record(model, chosen.calibration, per_run, weights, partial, bar)
    out.result(
        {"output": output, "model": model.name, "inputs": rows}, f"{rows} inputs of {model.name} written to {output}"
    )


@main.command()
@_BUNDLE
@click.option("--evaluation", type=_PATH, help="File that `trtconvert evaluate` wrote.")
@_output("report.html")
@_speaking
def report(bundle: Path, evaluation: Path | None, output: Path, out: Output) -> None:
    """Write an HTML report of BUNDLE: gates, samples, quality, precision and scales per site and timestep."""
    from trtconvert.evaluate.report import write_report

    write_report(bundle, evaluation, output)
    out.result({"output": output}, f"report of {bundle}: {output}")


@main.command()
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
@_output("comparison.html")
@_speaking
def compare(first: Path, second: Path, output: Path, out: Output) -> None:
    """Write an HTML page that compares two bundles: quality, speed, samples, and differences of their recipes."""
    from trtconvert.evaluate.comparison import write_comparison

    sides = write_comparison(first, second, output)
    out.result({"output": output, "bundles": sides}, f"{first} and {second}: {output}")


@main.command()
@_output("kernel_cost.json")
@_speaking
def measure(output: Path, out: Output) -> None:
    """Measure attention, layers and convolutions on this machine's GPU, for `plan: {kernel_cost: FILE}` in recipes."""
    from trtconvert.calib.measure import steps, write_kernel_cost
    from trtconvert.files import whole_file

    reporter = out.reporter()
    with whole_file(output, _OTHER_FILE) as partial, reporter.live(), reporter.stage("measure") as bar:
        bar.total(steps())
        write_kernel_cost(partial, bar.step)
    out.result({"output": output}, f"written to {output}")


@main.command()
@_speaking
def doctor(out: Output) -> None:
    """Print what this machine can build and run, and what is missing."""
    from dataclasses import asdict

    from trtconvert.doctor import examine, print_findings

    found = examine()
    out.result(
        {"findings": [asdict(finding) for finding in found]}, show=lambda console: print_findings(console, found)
    )


@main.command()
@click.argument("model")
@_output("recipe.yaml")
@click.option("--prompts", type=_PATH, help="Text file with one calibration prompt a line.")
@click.option("--lora", "loras", multiple=True, type=_PATH, help="LoRA file to merge; may be given again.")
@click.option("--force", is_flag=True, help="Overwrite an existing recipe.")
def init(model: str, output: Path, prompts: Path | None, loras: tuple[Path, ...], force: bool) -> None:
    """Write a commented recipe for MODEL.

    MODEL is the folder of a diffusers pipeline, a file of weights, an ONNX file, or the short name of a model: a published model
    such as sdxl or flux1, or digits-dit, which comes with the program. An unknown name prints the list of names.
    """
    from trtconvert.files import whole_file
    from trtconvert.starter import assumptions, recipe_text

    text = recipe_text(model, output, prompts, loras)
    if output.exists() and not force:
        raise UserError(
            f"{output} exists already",
            expected="a new file",
            got="an existing one",
            remedy=f"{_OTHER_FILE}, or overwrite the file with --force",
        )
    with whole_file(output, _OTHER_FILE) as partial:
        partial.write_text(text, encoding="utf-8")
    for assumed in assumptions(text):
        click.echo(f"assumed: {assumed}")
    click.echo(f"{output}: read the recipe, then run `trtconvert build {output}`")


_strategy = click.option(
    "--strategy",
    type=click.Choice(["names", "kandinsky"]),
    default="names",
    help="How embeddings and last layers are recognised: by their names; or (kandinsky) by their place in a model of blocks; "
    "kandinsky leaves these and the VAE's decoder unchanged.",
)
_NEW_FOLDER = click.option("-o", "--output", type=_PATH, required=True, help="New or empty folder.")


@main.command()
@click.argument("model", type=_PATH)
@_output("analysis.json")
@_strategy
@_speaking
def analyze(model: Path, output: Path, strategy: Any, out: Output) -> None:
    """Measure the error of INT8 for each tensor of MODEL: a file of weights, a folder of such files, or a pipeline's folder.

    Writes JSON for `trtconvert quantize --analysis` (its schema: `trtconvert schema analysis`), and an HTML page.
    """
    from trtconvert.evaluate.weights_page import write_page
    from trtconvert.files import require_writable, whole_file
    from trtconvert.weights.analysis import Rules, analyse
    from trtconvert.weights.sources import open_source
    from trtconvert.weights.tables import print_analysis

    page = output.with_suffix(".html")
    _require_suffix(output, ".json", "an analysis")
    source = open_source(model)
    for place in (output, page):
        require_writable(place, _OTHER_FILE)
    report = out.reporter()
    with report.live(), report.stage("analyze") as bar:
        found = analyse(source, bar, Rules(strategy=strategy))
    with whole_file(output, _OTHER_FILE) as partial:
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
@click.argument("model", type=_PATH)
@_NEW_FOLDER
@click.option("--analysis", type=_PATH, help="File that `trtconvert analyze` wrote for MODEL.")
@click.option(
    "--granularity",
    type=click.Choice(["block", "channel"]),
    default="block",
    help="One scale per block of 128 × 128 weights, or per output channel as in engines.",
)
@click.option(
    "--fallback-dtype",
    "fallback",
    type=click.Choice(["bf16", "fp16"]),
    default="bf16",
    help="Type of tensors that become neither INT8 nor FP32.",
)
@click.option(
    "--fp32",
    multiple=True,
    metavar="PATTERN",
    help="Names of further tensors that stay FP32, beside norms, embeddings and last layers; may be given again.",
)
@click.option(
    "--max-outliers",
    type=_FiniteRange(0, 1),
    default=0.01,
    help="Largest share of elements over four times the root mean square of their block; other weights do not become INT8.",
)
@click.option(
    "--min-elements",
    type=click.IntRange(0),
    default=4096,
    help="Smallest number of elements of a weight that becomes INT8.",
)
@_strategy
@_speaking
def quantize(model: Path, output: Path, analysis: Path | None, out: Output, **rules: Any) -> None:
    """Write MODEL with its weights in INT8, and copy the other files of its folder.

    Needs memory for the largest tensor, checks every written file, and resumes after it was killed.
    """
    from trtconvert.weights.analysis import Rules
    from trtconvert.weights.quantisation import quantise_model
    from trtconvert.weights.sources import open_source
    from trtconvert.weights.tables import outcome_values, print_outcome

    report = out.reporter()
    source = open_source(model)
    with report.live(), report.stage("quantize") as bar:
        outcome = quantise_model(source, output, Rules(**rules), analysis, bar)
    before = sum(tensor.nbytes for tensor in source.tensors)
    out.result(outcome_values(outcome, before), show=lambda console: print_outcome(console, outcome, before))


@main.command()
@click.argument("model", type=_PATH)
@_NEW_FOLDER
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16"]),
    help="Type of dequantised tensors; default: the type before quantize, or bf16 if that did not have 16 bits.",
)
@_speaking
def dequantize(model: Path, output: Path, dtype: Any, out: Output) -> None:
    """Write a MODEL of `trtconvert quantize` in 16 bits again."""
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
    """Parses `--replicas` into the smallest and the largest number of replicas; None means one per GPU.

    Raises:
        UserError: the text is not valid.
    """
    if text == "auto":
        return None, None
    least, colon, most = text.partition(":")
    parts = (least, most) if colon else (least, least)
    if all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        first, last = map(int, parts)
        if 1 <= first <= last:
            return first, last
    raise UserError(
        "--replicas is not a number of replicas",
        expected="auto, a number from 1, or LEAST:MOST",
        got=text,
        remedy="correct the option",
    )


def _at_most(option: str, number: int, other: str, most: int) -> None:
    if number > most:
        raise UserError(
            f"{option} is more than {other}",
            expected=f"at most {most}",
            got=str(number),
            remedy=f"lower it, or raise {other}",
        )


_MAX_BATCH = click.option(
    "--max-batch", type=click.IntRange(1, 64), default=8, help="Largest number of images of a batch."
)
_DEFAULT_STEPS = click.option("--steps", type=click.IntRange(1), default=50, help="Default number of denoising steps.")


@main.command("serve")
@_BUNDLE
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0: all. There is no login.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free port.")
@click.option("--name", help="Name of the model for clients; default: the name of the bundle's folder.")
@click.option("--address", help="Ray cluster, auto or HOST:PORT; default: a cluster of this machine alone.")
@click.option(
    "--replicas",
    default="auto",
    metavar="auto|N|LEAST:MOST",
    help="Number of replicas: one per GPU, a fixed number, or a range that follows the load.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="cuda: a GPU for each replica; cpu: ONNX Runtime; auto: cuda if the cluster has GPUs.",
)
@click.option("--cpus", type=_FiniteRange(0, 1024), default=1, help="Cores that each replica reserves.")
@_MAX_BATCH
@click.option(
    "--batch-wait-ms",
    type=_FiniteRange(0, 60_000),
    default=10,
    help="Longest wait of an image for others of its shape while a replica is free.",
)
@click.option(
    "--queue-limit",
    type=click.IntRange(1, 100_000),
    default=64,
    help="Largest number of images in work; further requests get status 429.",
)
@click.option("--max-images", type=click.IntRange(1, 100), default=10, help="Largest n of a request.")
@_DEFAULT_STEPS
@click.option("--max-steps", type=click.IntRange(1), default=100, help="Largest steps of a request.")
@click.option("--start-seconds", type=_FiniteRange(1), default=900, help="Longest start of a replica.")
@click.option("--request-seconds", type=_FiniteRange(0.1), default=600, help="Longest time of a request.")
@click.option(
    "--drain-seconds",
    type=_FiniteRange(0),
    default=60,
    help="Longest wait for running requests after SIGTERM or Ctrl-C.",
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
    """Serve BUNDLE over HTTP with the OpenAI images API and replicas on a Ray cluster. See docs/serving.md.

    Needs the extra `serve`. The server has no login and no encryption: put a proxy in front of the server.
    """
    from trtconvert.serving.server import Limits, Options, require_packages, serve

    require_packages()
    from trtconvert.serving.cluster import Placement

    _at_most("--steps", steps, "--max-steps", max_steps)
    _at_most("--max-images", max_images, "--queue-limit", queue_limit)
    least, most = _replicas(replicas)
    limits = Limits(name or bundle.resolve().name, max_images, steps, max_steps)
    options = Options(host, port, limits, max_batch, batch_wait_ms / 1000, queue_limit, request_seconds, drain_seconds)
    placement = Placement(address, least, most, device, cpus, start_seconds)
    context.exit(serve(bundle, options, placement, lambda line: click.echo(line)))


@main.command("export-triton")
@_BUNDLE
@click.option("-o", "--output", type=_PATH, required=True, help="Folder of the model repository.")
@click.option("--name", help="Name of the model; default: the bundle's folder. Components are named NAME-COMPONENT.")
@_MAX_BATCH
@click.option(
    "--batch-wait-ms",
    type=_FiniteRange(0, 60_000),
    default=10,
    help="Longest wait of a request for others of its batch.",
)
@click.option("--queue-limit", type=click.IntRange(1, 100_000), default=64, help="Largest number of waiting requests.")
@_DEFAULT_STEPS
@click.option("--max-steps", type=click.IntRange(1), default=100, help="Largest STEPS of a request.")
@click.option("--force", is_flag=True, help="Replace existing models of these names.")
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
    wait = round(batch_wait_ms * 1000)
    settings = Settings(name or bundle.resolve().name, max_batch, wait, queue_limit, steps, max_steps)
    for line in export_triton(bundle, output, settings, force=force):
        click.echo(line)


@main.command()
@click.argument("of", type=click.Choice(["recipe", "analysis", "events"]), default="recipe")
def schema(of: str) -> None:
    """Print the JSON schema of recipes, of the output of `trtconvert analyze`, or of a line of progress (--json)."""
    import json

    from trtconvert.recipe import json_schema

    if of == "analysis":
        from trtconvert.weights.analysis import Analysis

        found = Analysis.model_json_schema()
    elif of == "events":
        from trtconvert.progress import events_schema

        found = events_schema()
    else:
        found = json_schema()
    click.echo(json.dumps(found, indent=2, default=str))


main.add_command(commands(_speaking))

if __name__ == "__main__":
    main()
