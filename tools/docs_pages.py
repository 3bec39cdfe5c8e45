"""Pages of the documentation that are made of other files, for MkDocs (`hooks` in mkdocs.yml).

The README becomes the first page, the READMEs of the plugins become pages of kernels, and every field of a recipe a line of the
recipe reference. What the tables of measurements say of a model is gathered on a page of the model. Links are those of the
repository: what is no page is shown as its path.
"""

from __future__ import annotations

import posixpath
import re
import types
import typing
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
} | {
    f"plugins/{path.parent.name}/README.md": f"kernels/{path.parent.name}.md"
    for path in ROOT.glob("plugins/*/README.md")
}
"""What lies elsewhere in the repository, and the page that it becomes."""
MEASURED = {
    "flux": ("Flux.1", "Flux"),
    "pixart-sigma": ("PixArt-Σ", "PixArt"),
    "sd3": ("Stable Diffusion 3", "SD 3"),
    "sd15": ("Stable Diffusion 1.5", "SD 1.5"),
    "sdxl": ("SDXL", "SDXL"),
    "wan21": ("Wan 2.1", "Wan"),
    "kandinsky5": ("Kandinsky 5", "Kandinsky 5"),
}
"""Models with pages of their own: the page, its title, and how tables call the model."""
MEASUREMENTS = ("figures.md", "steps.md", "layers.md", "scales.md", "weights.md")
"""The pages whose tables have figures of models."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SOURCES = {page: source for source, page in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "recipe.md", content=recipe_reference()))
    for page in MEASURED:
        files.append(File.generated(config, f"measured-{page}.md", content=model_page(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the repository become links between pages."""
    here = page.file.src_uri
    return _LINK.sub(lambda link: _linked(link, here, files), markdown)


def _linked(link: re.Match[str], here: str, files: Files) -> str:
    picture, text, target = link.groups()
    path, hash_, anchor = target.partition("#")
    if "://" in target or target.startswith("mailto:") or not path:
        return link[0]
    folder = posixpath.dirname(_SOURCES.get(here, f"docs/{here}"))
    place = posixpath.normpath(posixpath.join(folder, path))
    if not (ROOT / place).exists() and files.get_file_from_path(place.removeprefix("docs/")) is None:
        return link[0]  # MkDocs reports it
    wanted = PAGES.get(place, place.removeprefix("docs/"))
    if files.get_file_from_path(wanted) is None:
        return text if text.startswith("`") else f"{text} (`{place}`)"
    relative = posixpath.relpath(wanted, posixpath.dirname(here) or ".")
    return f"{picture}[{text}]({relative}{hash_}{anchor})"


def model_page(page: str) -> str:
    """What tables say of a model, in Markdown: the rows about it, under what the table's page says before them."""
    title, name = MEASURED[page]
    lines = [
        f"# {title}: measurements",
        "",
        "Gathered from the pages that say how all this was measured, and of what.",
        "",
    ]
    for source in MEASUREMENTS:
        text = (ROOT / "docs" / source).read_text(encoding="utf-8")
        for table in _tables(text):
            if rows := _rows_of(name, table.rows):
                lines += [f"## [{table.heading}]({source})", "", *table.before, "", *table.rows[:2], *rows, ""]
    return "\n".join(lines)


class _Table(typing.NamedTuple):
    """A table of a page: its lines, the heading that it stands under, and the paragraph before it."""

    rows: list[str]
    heading: str
    before: list[str]


def _tables(text: str) -> typing.Iterator[_Table]:
    heading, paragraph = "", list[str]()
    for block in re.split(r"\n{2,}", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading, paragraph = lines[0].lstrip("# "), []
            lines = lines[1:]
        if len(lines) > 2 and lines[0].startswith("|"):
            yield _Table(lines, heading, paragraph)
        elif lines:
            paragraph = lines


def _rows_of(name: str, rows: list[str]) -> list[str]:
    """The rows about a model, with those below that leave out its name; all where the table's head has it."""
    of_model, found = _first_cell(rows[0]).startswith(name), list[str]()
    whole = of_model
    for row in rows[2:]:
        cell = _first_cell(row)
        if cell and not cell.startswith("the same"):
            of_model = whole or cell.startswith(name)
        if of_model:
            found.append(row)
    return found


def _first_cell(row: str) -> str:
    return row.strip("|").partition("|")[0].strip(" *")


def recipe_reference() -> str:
    """Every section and field of a recipe, in Markdown."""
    from trtconvert.recipe import Recipe

    lines = [
        "# Recipe reference", "",
        "Every field of a recipe with its type, default and meaning, as `trtconvert schema` has them.", "",
    ]  # fmt: skip
    lines += _section(Recipe, "", 2)
    return "\n".join(lines) + "\n"


def _section(model: type[BaseModel], name: str, level: int) -> list[str]:
    """A heading, a table of the fields that are no sections, and the sections."""
    lines = [f"{'#' * level} `{name}`", ""] if name else []
    if name and model.__doc__:
        lines += [" ".join(model.__doc__.split()), ""]
    plain, sections = list[tuple[str, FieldInfo]](), list[tuple[str, type[BaseModel], str]]()
    for key, field in model.model_fields.items():
        inner = next((t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        shown = field.alias or key
        if inner is None:
            plain.append((shown, field))
        else:
            sections.append((f"{name}.{shown}" if name else shown, inner, field.description or ""))
    if plain:
        lines += ["| field | type | default | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{key}` | {_cell(_shown(field.annotation))} | {_default(field)} | {_cell(field.description or '')} |"
            for key, field in plain
        ]
        lines.append("")
    for title, inner, description in sections:
        made = _section(inner, title, level)
        lines += [*made[:2], description, "", *made[2:]] if description else made
    return lines


def _types(annotation: Any) -> list[Any]:
    """A type and all that it is made of."""
    return [annotation, *(t for argument in typing.get_args(annotation) for t in _types(argument))]


def _shown(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shown(a) for a in arguments if a is not type(None))
    if origin is typing.Annotated:
        return _shown(arguments[0])
    if origin is not None:
        inner = ", ".join(_shown(a) for a in arguments if a is not ...)
        return f"{origin.__name__} of {inner}" if inner else origin.__name__
    return {"str": "text", "Path": "path", "NoneType": "nothing", "bool": "true or false"}.get(
        name := getattr(annotation, "__name__", str(annotation)), name
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if field.default_factory is not None else field.default
    return "" if value is None or value == {} or value == [] else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
