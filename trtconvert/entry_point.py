"""The user's functions that a recipe or an option names as `package.module:function`."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.imports import names_of


def look_in(folder: Path) -> None:
    """Adds a folder to the places where functions are looked for, after Python's own: a recipe's folder, or the current folder of
    the command line."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def import_function(name: str, role: str) -> Any:
    """Imports the function `package.module:function`.

    Args:
        role: of the function, for the message.
    Raises:
        UserError: the import fails, with any exception of the user's code.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            raise TypeError(f"{function!r} is not a callable object")
        return function
    except Exception as error:
        raise UserError(
            f"{role} '{name}' cannot be imported",
            expected="an importable module with that function",
            got=f"{type(error).__name__}: {error}",
            remedy=_remedy(module, error),
        ) from error


def _remedy(module: str, error: Exception) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return "correct the module, or the name of the function in the recipe; --debug shows where it failed"
    if error.name is None or module == error.name or module.startswith(f"{error.name}."):
        return (
            "put the module beside the recipe or into the current folder, install it, or set PYTHONPATH to its folder"
        )
    return f"install {error.name}, which the module imports, or put it beside the module"


def source_identity(name: str) -> str:
    """Returns the SHA-256 of the code that a function depends on: its file, and the user's own files that it imports, directly or
    not; "" without such a file. The code is not run, other than the packages around the file.

    The user's own files are those in the folder that holds the function's package or module; if packages are installed there,
    those of this package alone.

    Args:
        name: `package.module:function`.
    """
    files, _ = _code_of(name)
    hashes = [sha256(path) for path in sorted(files)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes else ""


def names_of_ours(name: str) -> set[str]:
    """Returns the modules of trtconvert, and the names in them, that the code of a function imports, see `source_identity`.

    Args:
        name: `package.module:function`.
    """
    _, imported = _code_of(name)
    return {other for other in imported if other.partition(".")[0] == __package__}


def _code_of(name: str) -> tuple[set[Path], set[str]]:
    """Returns the user's own files that a function depends on, and the names of these modules and of their imports."""
    module, colon, _ = name.partition(":")
    if not colon:
        return set(), set()
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # of the user's package, which `find_spec` imports; importing the function reports it
        return set(), set()
    if not spec or not spec.origin or not Path(spec.origin).is_file():
        return set(), set()
    file = Path(spec.origin)
    files, imported = _imported_files(file, module)
    return {file} | files, imported


def _imported_files(file: Path, module: str) -> tuple[set[Path], set[str]]:
    """Returns the files of a module and of everything that it imports, with the packages around them, as far as they are in the
    folder that holds the module's package; and the names of these modules and of their imports."""
    depth = module.count(".") + (file.name == "__init__.py")
    folder, own = file.parents[depth], module.partition(".")[0]
    # A package may lie in a folder of another name.
    place = file.parents[depth - 1] if depth else folder / own
    libraries = {Path(sysconfig.get_path(where)) for where in ("stdlib", "purelib", "platlib")}
    installed = folder in libraries or next(folder.glob("*.dist-info"), None) is not None
    found, names, left = dict[str, Path | None](), {module}, [module]
    while left:
        name = left.pop()
        first, *inner = name.split(".")
        if name in found or (installed and first != own):
            continue
        found[name] = path = _module_file((place if first == own else folder / first).joinpath(*inner))
        package, dot, _ = name.rpartition(".")
        left += [package] if dot else []
        if path is not None:
            imported = {*_imports(path, name if path.name == "__init__.py" else package)}
            names |= imported
            left += imported
    return {path for path in found.values() if path is not None}, names


def _module_file(place: Path) -> Path | None:
    return next((path for path in (place / "__init__.py", place.with_name(f"{place.name}.py")) if path.is_file()), None)


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yields the names that a file imports: modules, and names in modules. Relative imports start from `package`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # importing the user's code shows them
            tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):  # importing the function raises it
        return
    for node in ast.walk(tree):
        yield from names_of(node, package)


def function_identity(name: str, function: Any) -> str:
    """Returns the SHA-256 of a function's name, of the code that it depends on, and of the file that defines it.

    Args:
        name: `package.module:function`.
        function: the function itself, see `import_function`.
    """
    hashes = [source_identity(name)]
    with contextlib.suppress(TypeError):  # built-in functions have no file
        written = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        if (file := Path(inspect.getsourcefile(written) or "")).is_file():
            hashes.append(sha256(file))
    return hashlib.sha256(" ".join([name, *hashes]).encode()).hexdigest()
