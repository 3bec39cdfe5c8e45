"""The code of this package that a module depends on: its own, and that of all that it imports, as the texts of the files say.
Nothing is imported to find out."""

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
    """Modules, the packages that they lie in, all modules of this package that those import, and so on.

    An import counts wherever it stands: in functions too, but not under `if TYPE_CHECKING`. So does a text that names a module,
    as `import_module` takes them. What a package imports only when it is asked for a name (`__getattr__`) counts where that name
    is imported, and where the package itself is.

    Args:
        names: of modules, or of what is in them. Those of other packages do not count.
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
    """SHA-256 of the code of `code_modules`."""
    digest = hashlib.sha256()
    for module in sorted(code_modules(names)):
        digest.update(f"{module} {hashlib.sha256(_sources()[module]).hexdigest()}\n".encode())
    return digest.hexdigest()


@functools.cache
def _sources() -> Mapping[str, bytes]:
    """The files of this package by the names of their modules, all read at one time: somebody may edit them during a build."""
    found = {}
    for path in _PACKAGE.rglob("*.py"):
        inner = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        found[".".join(inner[:-1] if inner[-1] == "__init__" else inner)] = path.read_bytes()
    return found


def _module_of(name: str) -> str:
    """The module of this package that a name is, or lies in; empty where there is none."""
    while name and name not in _sources():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def _imports(module: str) -> set[str]:
    return imported_names(_sources()[module].decode())


def imported_names(source: str) -> set[str]:
    """What a module imports of this package when it is imported or one of its functions runs: modules, and names in modules.

    Regular expressions find the statements, which Python's parser reads: it would take seconds for whole files.
    """
    if _ON_DEMAND in source:
        tree = ast.parse(source)
        return _names(node for node in tree.body if getattr(node, "name", "") != "__getattr__")
    without = _FOR_TYPES.sub("", source)
    try:
        statements = ast.parse("\n".join(_IMPORT.findall(without)))
    except SyntaxError:  # a line of a docstring that begins so, or a statement that the expression cuts off
        return _names([ast.parse(source)])
    return _names([statements]) | {*_TEXT.findall(without)}


@functools.cache
def _on_demand(module: str) -> dict[str, str]:
    """What a module imports when it is asked for a name: the names of its `__all__` that it imports for type checkers."""
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
    """What the nodes of syntax trees import of this package, but for those that are there for type checkers."""
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
    """The names that a statement imports, in full: of modules, and of what is in modules.

    Args:
        package: that the statement's module lies in, or is, which relative imports begin at.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            if alias.asname is None:  # what is bound is the outermost package
                yield alias.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
