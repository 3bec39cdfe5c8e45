"""What the documentation tells users to write is what the program takes: recipes, commands, and Python."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML
from support import REPOSITORY

from trtconvert.cli import main
from trtconvert.recipe import Recipe

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(trtconvert [a-z][^`]*)`")


def blocks(kind: str) -> list[tuple[Path, str]]:
    pages = [(page, _BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES]
    return [(page, text) for page, found in pages for of_kind, text in found if of_kind == kind]


def commands() -> list[tuple[str, str]]:
    """Command lines of blocks and of sentences, by the page."""
    found = list[tuple[str, str]]()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for _, block in _BLOCK.findall(text) for line in block.splitlines()]
        lines += [line.strip() for line in text.splitlines() if line.startswith("    trtconvert ")]
        lines += _INLINE.findall(" ".join(_BLOCK.sub("", text).split()))
        found += [(page.name, line) for line in lines if line.startswith("trtconvert ")]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_exist_with_their_options(page, line):
    words = shlex.split(re.split(r"\s#\s", line)[0].replace("…", ""))[1:]
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {
        "--help",
        "-h",
        "--version",
    }
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("page_and_text", blocks("yaml"), ids=lambda of: of[0].name)
def test_recipes_are_recipes(page_and_text):
    """A recipe or a part of one: every section and field is known and takes the value that is shown."""
    data = YAML(typ="safe", pure=True).load(page_and_text[1])
    data.setdefault("model", {}).setdefault("source", "digits-dit")
    try:
        Recipe.model_validate(data)
    except ValidationError as refused:
        # What rules say of several fields wants the whole of a recipe.
        assert {error["type"] for error in refused.errors()} <= {"value_error"}, refused


@pytest.mark.parametrize("page_and_text", blocks("python"), ids=lambda of: of[0].name)
def test_python_imports_what_there_is(page_and_text):
    for node in ast.walk(ast.parse(page_and_text[1])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trtconvert"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("trtconvert"):
                    importlib.import_module(alias.name)
