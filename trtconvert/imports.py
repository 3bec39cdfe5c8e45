"""Finds the code of this package that a module depends on, from the texts of the files. No module is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

_PACKAGE = Path(__file__).parent
_OWN = _PACKAGE.name
_FOR_TYPES = re.compile(r"^([ \t]*)if TYPE_CHECKING:.*\n(?:\1[ \t]+\S.*\n|[ \t]*\n)*", re.MULTILINE)
_IMPORT = re.compile(rf"^[ \t]*((?:from|import)[ \t]+{_OWN}\b(?:[^\n(]*\([^)]*\)|[^\n]*))", re.MULTILINE)
_MODULE = rf"({_OWN}(?:\.\w+)+)(?::[\w.]+)?"
_TEXT = re.compile(rf"""["']{_MODULE}["']""")
_ON_DEMAND = "\ndef __getattr__("


def code_modules(names: Iterable[str]) -> set[str]:
    """Returns modules, their packages, and all modules of this package that they import, directly and indirectly.

    Imports inside functions count, imports under `if TYPE_CHECKING` do not. A string with the name of a module counts, because
    `import_module` takes strings. Imports of a package's `__getattr__` count if the name or the package is imported.

    Args:
        names: names of modules or of their content. Names of other packages are ignored.
    """
    found, left = set[str](), {*names}
    while left:
        name = left.pop()
        if not (module := _module_of(name)):
            continue
        inner, on_demand = name.removeprefix(module).strip(".").partition(".")[0], _on_demand(module)
        left |= {on_demand[inner]} if inner in on_demand else set() if inner else {*on_demand.values()}
        parts = module.split(".")
        for new in {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)} - found:
            found.add(new)
            left |= _imports(new)
    return found


def code_hash(names: Iterable[str]) -> str:
    """Returns the SHA-256 of the code of `code_modules`."""
    digest = hashlib.sha256()
    for module in sorted(code_modules(names)):
        digest.update(f"{module} {hashlib.sha256(_sources()[module]).hexdigest()}\n".encode())
    return digest.hexdigest()


@functools.cache
def _sources() -> Mapping[str, bytes]:
    """Reads all files of this package at one time, because files may be edited during a build."""
    found = {}
    for path in _PACKAGE.rglob("*.py"):
        inner = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        found[".".join(inner[:-1] if inner[-1] == "__init__" else inner)] = path.read_bytes()
    return found


def _module_of(name: str) -> str:
    """Returns the module of this package that a name denotes or lies in; empty if there is none."""
    while name and name not in _sources():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def _imports(module: str) -> set[str]:
    return imported_names(_sources()[module].decode())


def imported_names(source: str) -> set[str]:
    """Returns the modules, and names in modules, of this package that a source text imports, in functions too.

    Regular expressions find the import statements, because Python's parser takes seconds for whole files.
    """
    if _ON_DEMAND in source:
        tree = ast.parse(source)
        return _names(node for node in tree.body if getattr(node, "name", "") != "__getattr__")
    without = _FOR_TYPES.sub("", source)
    try:
        statements = ast.parse("\n".join(_IMPORT.findall(without)))
    except SyntaxError:  # a docstring line like an import, or a statement that the expression cuts off
        return _names([ast.parse(source)])
    return _names([statements]) | {*_TEXT.findall(without)}


@functools.cache
def _on_demand(module: str) -> dict[str, str]:
    """Returns the imports of a module's `__getattr__`: the names of `__all__` that it imports for type checkers."""
    source = _sources()[module].decode()
    if _ON_DEMAND not in source:
        return {}
    tree = ast.parse(source)
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    for_types = [inner for node in tree.body if _is_for_types(node) for inner in ast.walk(node)]
    full = [name for node in for_types for name in names_of(node)]
    return {name.rpartition(".")[2]: name for name in full if name.rpartition(".")[2] in public}


def _names(trees: Iterable[ast.AST]) -> set[str]:
    """Returns the names of this package that syntax trees import, except under `if TYPE_CHECKING`."""
    found, left = set[str](), [*trees]
    while left:
        node = left.pop()
        found.update(name for name in names_of(node) if name.partition(".")[0] == _OWN)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(f"^{_MODULE}$", node.value))
        left += node.orelse if _is_for_types(node) else ast.iter_child_nodes(node)
    return found


def _is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def names_of(node: ast.AST, package: str = "") -> Iterator[str]:
    """Yields the full names of modules, and of their content, that a statement imports.

    Args:
        package: base of relative imports.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            if alias.asname is None:  # binds the outermost package
                yield alias.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
