"""The command line. Imports what a command needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtconvert import __version__
from trtconvert.errors import TrtconvertError, UserError

if TYPE_CHECKING:
    from trtconvert.cache import Cache


class _Commands(click.Group):
    """Turns every failure into a message and an exit code: 2 for the user's mistakes, 1 for what went wrong here."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.ClickException, click.exceptions.Exit, click.exceptions.Abort):
            raise
        except BrokenPipeError:
            raise  # the reader of a pipe has left; click ends quietly
        except KeyboardInterrupt:
            click.echo("interrupted; finished stages stay in the cache, nothing half-written is left", err=True)
            sys.exit(130)
        except TrtconvertError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except Exception as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            text = str(error).strip().splitlines()
            click.echo(f"internal error: {type(error).__name__}: {text[0] if text else 'no message'}", err=True)
            click.echo("  remedy: this is a fault of trtconvert; please report it with the output of --debug", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtconvert")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Turn diffusion models into TensorRT engines with INT8 attention that follows the denoising timestep."""
    # Leave by the way of an exception, so that temporary folders go.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle; out/NAME by default.")
@click.option("--cache", "cache_folder", type=click.Path(path_type=Path), help="Folder of the build cache.")
@click.option("--no-cache", is_flag=True, help="Redo every stage, and keep nothing.")
def build(recipe: Path, output: Path | None, cache_folder: Path | None, no_cache: bool) -> None:
    """Convert the model of RECIPE and leave a bundle."""
    from rich.console import Console

    from trtconvert import pipeline, summary
    from trtconvert.progress import Reporter
    from trtconvert.recipe import load_recipe

    report = Reporter(Console(highlight=False))
    output = output or Path("out") / recipe.stem
    with _cache(cache_folder, no_cache) as cache:
        outcome = pipeline.build(load_recipe(recipe), output, cache, report)
    summary.print_build(outcome, report)


@contextlib.contextmanager
def _cache(folder: Path | None, disabled: bool) -> Iterator[Cache]:
    import tempfile

    from trtconvert.cache import Cache, default_folder

    if disabled:
        with tempfile.TemporaryDirectory(prefix="trtconvert-") as name:
            yield Cache(Path(name))
    else:
        yield Cache(folder or default_folder())


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds, after checking every file in it."""
    from rich.console import Console

    from trtconvert import summary
    from trtconvert.bundle import check_files, read_manifest

    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    if as_json:
        click.echo(manifest.model_dump_json(indent=1))
    else:
        summary.print_manifest(Console(highlight=False), manifest, bundle)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("samples.png"), show_default=True)
@click.option("-n", "--samples", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=50, show_default=True)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first sample.")
def run(bundle: Path, output: Path, samples: int, steps: int, solver: str, seed: int) -> None:
    """Sample images with BUNDLE on what this machine can run."""
    import time

    from trtconvert import models, runtime
    from trtconvert.evaluate.grid import save_sheet
    from trtconvert.files import whole_file

    if output.suffix.lower() != ".png":
        raise UserError(
            f"samples are not written as '{output.name}'",
            expected="a file that ends in .png",
            got=output.suffix or "no ending",
            remedy="give another file with -o",
        )
    loaded = runtime.load(bundle)
    draw = models.load_sampler(loaded.manifest.recipe.model)
    with whole_file(output) as partial:
        started = time.perf_counter()
        images = draw(loaded["denoiser"], range(seed, seed + samples), steps=steps, solver=solver)
        seconds = time.perf_counter() - started
        save_sheet(images, partial)
    click.echo(f"{samples} samples in {seconds:.1f} s on {loaded.backend}: {output}")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--weights", type=click.Path(path_type=Path), help="Weights of the full-precision model, to compare with."
)
@click.option("-n", "--samples", type=click.IntRange(10), default=10_000, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=100_000, show_default=True, help="Seed of the first sample.")
@click.option(
    "--features",
    default="digits-classifier",
    show_default=True,
    help="digits-classifier, inception, or package.module:function.",
)
@click.option("--features-weights", type=click.Path(path_type=Path), help="Weights of the feature extractor.")
@click.option("--reference", default="digits", show_default=True, help="digits (held out), or a folder of images.")
@click.option("--lpips-weights", type=click.Path(path_type=Path), help="torchvision's AlexNet weights: adds LPIPS.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder of finished shards; in the user's cache by default."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("evaluation.json"), show_default=True)
def evaluate(bundle: Path, work: Path | None, output: Path, **request: Any) -> None:
    """Measure the quality of BUNDLE's samples: PSNR, SSIM, FID, KID, IS, precision, recall.

    Goes on where it was when it was killed. Under torchrun, the processes share the work.
    """
    from rich.console import Console

    from trtconvert.cache import default_folder
    from trtconvert.calib.distributed import joined_ranks
    from trtconvert.evaluate import evaluation
    from trtconvert.evaluate.table import print_evaluation
    from trtconvert.files import whole_file
    from trtconvert.progress import Reporter

    with joined_ranks() as ranks:
        console = Console(highlight=False, quiet=ranks.rank > 0)
        found = evaluation.evaluate(
            bundle, evaluation.Request(**request), work or default_folder() / "evaluate", ranks, Reporter(console)
        )
    if found is not None:
        with whole_file(output) as partial:
            partial.write_text(found.model_dump_json(indent=1))
        print_evaluation(console, found)
        console.print(f"written to {output}; `trtconvert report {bundle} --evaluation {output}` shows it")


@main.command()
def doctor() -> None:
    """Tell what this machine can build and run, and what is missing."""
    from rich.console import Console

    from trtconvert.doctor import examine, print_findings

    print_findings(Console(highlight=False), examine())


@main.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    import json

    from trtconvert.recipe import json_schema

    click.echo(json.dumps(json_schema(), indent=2, default=str))


if __name__ == "__main__":
    main()
