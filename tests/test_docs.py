"""The program accepts everything that the documentation tells users to write: recipes, commands, and Python."""

from __future__ import annotations

import ast
import importlib
import re
import shlex

import click
import pytest
from documented import BLOCK, PAGES, blocks
from pydantic import ValidationError
from ruamel.yaml import YAML

from trtconvert.cli import main
from trtconvert.recipe import Recipe

_INLINE = re.compile(r"`(trtconvert [a-z][^`]*)`")


def commands() -> list[tuple[str, str]]:
    """Return command lines in blocks and sentences, by page."""
    found = list[tuple[str, str]]()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for _, block in BLOCK.findall(text) for line in block.splitlines()]
        lines += [line.strip() for line in text.splitlines() if line.startswith("    trtconvert ")]
        lines += _INLINE.findall(" ".join(BLOCK.sub("", text).split()))
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


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_recipes_are_recipes(block):
    """A recipe or a part of one: every section and field is known and takes the printed value."""
    data = YAML(typ="safe", pure=True).load(block.text)
    data.setdefault("model", {}).setdefault("source", "digits-dit")
    try:
        Recipe.model_validate(data)
    except ValidationError as refused:
        # What rules say of several fields wants the whole of a recipe.
        assert {error["type"] for error in refused.errors()} <= {"value_error"}, refused


def test_fences_name_what_tests_look_for():
    kinds = {
        kind for page in PAGES for kind in re.findall(r"^ *```+(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert kinds == {"python", "yaml"}


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_imports_what_there_is(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trtconvert"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("trtconvert"):
                    importlib.import_module(alias.name)
