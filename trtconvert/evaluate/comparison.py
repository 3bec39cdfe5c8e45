"""The page of `trtconvert compare`: two bundles side by side in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtconvert.bundle import EngineRecord, Manifest, check_files, read_unchanged
from trtconvert.errors import UserError
from trtconvert.evaluate.pages import template
from trtconvert.evaluate.report import gates, picture_of, tiles
from trtconvert.files import real_path, whole_file


@dataclass(frozen=True)
class Side:
    """One bundle on the page.

    Attributes:
        title: the folder's name. figures: by label, the tiles and gates of `trtconvert report`.
        engines: by GPU, microseconds of a call as the build timed it; None where the build compared nothing.
        settings: the recipe, by the path of each field. picture: samples, PNG in base64, or "".
    """

    title: str
    model: str
    figures: Mapping[str, str]
    engines: Mapping[str, float | None]
    settings: Mapping[str, str]
    picture: str


@dataclass(frozen=True)
class Row:
    """A line of a table: its label, and the text of each bundle."""

    label: str
    first: str
    second: str

    @property
    def differs(self) -> bool:
        return self.first != self.second


def write_comparison(first: Path, second: Path, output: Path) -> list[dict[str, Any]]:
    """Writes the page.

    Args:
        first, second: folders of bundles.
        output: the HTML file.
    Returns:
        The fields of `Side` of each bundle, without the picture.
    Raises:
        UserError: a folder is no bundle or a damaged one, both are the same, or the output cannot be written.
    """
    if real_path(first) == real_path(second):
        raise UserError(
            "a bundle is compared with itself",
            expected="two folders of bundles",
            got=f"{first} twice",
            remedy="name another bundle",
        )
    sides = [
        read_unchanged(folder, lambda manifest, folder=folder: _side(folder, manifest)) for folder in (first, second)
    ]
    with whole_file(output, "give another file with -o") as partial:
        partial.write_text(render(*sides), encoding="utf-8")
    return [{name: value for name, value in vars(side).items() if name != "picture"} for side in sides]


def render(first: Side, second: Side) -> str:
    """Returns the page as HTML."""
    figures = _rows(first.figures, second.figures)
    speed = [
        Row(gpu, *(_time(side.engines[gpu]) if gpu in side.engines else "no engine" for side in (first, second)))
        for gpu in _either(first.engines, second.engines)
    ]
    return template("comparison.html.j2").render(
        first=first,
        second=second,
        figures=figures,
        speed=speed,
        settings=[row for row in _rows(first.settings, second.settings) if row.differs],
    )


def _side(folder: Path, manifest: Manifest) -> Side:
    check_files(folder, manifest)
    figures = {
        tile.label: f"{tile.figure} ({tile.note})" if tile.note else tile.figure for tile in tiles(manifest, None)
    }
    # Tiles show the gates of images and worst parts already.
    figures |= {gate.name: gate.got for gate in gates(manifest) if not gate.name.startswith(("Images", "Worst"))}
    figures["Size on disk"] = f"{sum(file.size for file in manifest.files.values()) / 2**20:.1f} MiB"
    denoiser = next(component for component in manifest.components.values() if component.is_denoiser)
    return Side(
        folder.name or real_path(folder).name,
        manifest.model,
        figures,
        {engine.gpu or engine.target: _microseconds(engine) for engine in denoiser.engines},
        dict(_flat(manifest.recipe.model_dump(mode="json"))),
        picture_of(folder, manifest),
    )


def _microseconds(engine: EngineRecord) -> float | None:
    """Returns the time of a call of the engine: the shortest time that the build measured."""
    compared = [
        *engine.layers_us.values(),
        *(us for us in (engine.plugin_us, engine.native_us, engine.with_plugins_us, engine.plain_us) if us is not None),
    ]
    return min(compared, default=None)


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{place}.{name}" if place else str(name))
    else:
        yield place, "" if value is None else str(value)


def _either(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _rows(first: Mapping[str, str], second: Mapping[str, str]) -> list[Row]:
    return [Row(label, first.get(label, ""), second.get(label, "")) for label in _either(first, second)]


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "not timed"
    return f"{microseconds / 1000:.3f} ms" if microseconds >= 1000 else f"{microseconds:.0f} µs"
