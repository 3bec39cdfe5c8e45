"""Functions of the user's own that a recipe or an option names as `package.module:function`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from trtconvert.errors import UserError
from trtconvert.files import sha256


def import_function(name: str, role: str) -> Any:
    """The function that `package.module:function` names.

    Args:
        role: what it is for, for the message.
    Raises:
        UserError: it cannot be imported. What the user's own code raises, whatever it is, is no fault of this package.
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
            remedy="install the module, or set PYTHONPATH to the folder that holds it",
        ) from error


def source_file(name: str) -> Path | None:
    """The file that holds the function, without importing it; None where that cannot be told."""
    module, colon, _ = name.partition(":")
    if not colon:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # of the user's own package, which is imported for it; importing the function reports it
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def function_identity(name: str, function: Any) -> str:
    """SHA-256 of a function's name, of the file of the module that it is named in, and of the file that it is written in.

    Args:
        name: `package.module:function`; function: what it names, see `import_function`.
    """
    files = [source_file(name)]
    with contextlib.suppress(TypeError):  # what is built in has no file
        written = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        files.append(Path(inspect.getsourcefile(written) or ""))
    hashes = [sha256(file) for file in files if file is not None and file.is_file()]
    return hashlib.sha256(" ".join([name, *hashes]).encode()).hexdigest()
