"""Generated pages of the documentation, for MkDocs (`hooks` in mkdocs.yml).

The README becomes the first page, the READMEs of the plugins become pages of kernels, every field of a recipe a line of the
recipe reference, and every command and option a line of the reference of commands. The page of figures gets its plots. Links
are those of the repository: a target that is no page is shown as its path.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import types
import typing
from pathlib import Path
from typing import Any

import click
import figures_page
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
"""Files outside of docs/, and the pages that they become."""
ALONE = ("index.md", "quickstart.md", "concepts.md", "figures.md")
"""Tabs with a single page: the page takes the width of the list of pages, too."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SOURCES = {page: source for source, page in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "recipe.md", content=recipe_reference()))
    files.append(File.generated(config, "commands.md", content=command_reference()))
    for name, plot in figures_page.plots().items():
        files.append(File.generated(config, f"plots/{name}.svg", content=plot))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages."""
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    if here == "figures.md":
        markdown = figures_page.with_plots(markdown)
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


def recipe_reference() -> str:
    """Returns the page of every section and field of a recipe, in Markdown."""
    from trtconvert.recipe import Recipe

    lines = [
        "# Recipe reference", "",
        "Every field of a recipe with its type, default and meaning, as `trtconvert schema` has them.", "",
    ]  # fmt: skip
    lines += _section(Recipe, "", 2)
    return "\n".join(lines) + "\n"


def _section(model: type[BaseModel], name: str, level: int) -> list[str]:
    """Returns a heading, a table of the fields that are no sections, and the sections."""
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
    """Returns a type and all types inside it."""
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


def command_reference() -> str:
    """Returns the page of every command with its arguments and options, in Markdown."""
    from trtconvert.cli import main

    lines = [
        "# Commands", "",
        "Every command with its options, as `trtconvert COMMAND --help` has them.",
        "[From programs](automation.md) describes `--json`, `--quiet` and exit codes.", "",
    ]  # fmt: skip
    return "\n".join([*lines, *_commands(main, "trtconvert")]) + "\n"


def _commands(group: click.Group, name: str) -> list[str]:
    lines = list[str]()
    for key, command in group.commands.items():
        shown = f"{name} {key}"
        if isinstance(command, click.Group):
            lines += _commands(command, shown)
            continue
        arguments = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
        lines += [f"## `{' '.join([shown, *arguments])}`", "", inspect.cleandoc(command.help or ""), ""]
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        for_programs = [f"`{name}`" for name in ("--quiet", "--json") if any(name in o.opts for o in options)]
        options = [o for o in options if not {"--quiet", "--json"} & {*o.opts}]
        if for_programs:
            lines += [f"Also {' and '.join(for_programs)}.", ""]
        if options:
            lines += ["| option | value | default | |", "| --- | --- | --- | --- |", *map(_option, options), ""]
    return lines


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*reversed(option.opts), *option.secondary_opts))
    value = "" if option.is_flag else f"`{option.metavar}`" if option.metavar else _kind(option.type)
    return f"| {names} | {_cell(value)} | {_cell(_default_of(option))} | {_cell(option.help or '')} |"


def _kind(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    return f"`{kind.name.partition(' ')[0].upper()}`"


def _default_of(option: click.Option) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.get_default(click.Context(click.Command("trtconvert")), call=False)
    shown = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"`{default}`" if shown else ""
