"""Damage for tests to values of JSON, to text and to files, determined by a seed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trtconvert.bundle import MANIFEST
from trtconvert.errors import TrtconvertError, UserError

ROUNDS = int(os.environ.get("TRTCONVERT_SOAK", "0"))
"""How many inputs of each kind are damaged, by `make soak`; where it is not set, as many as take a few seconds."""

SECONDS = 5
"""Most seconds of any of them, on a machine with other work. The goal is a second."""


def rounds(usual: int) -> range:
    return range(ROUNDS or usual)


class Watch:
    """Counts reads and refusals, and fails for anything else."""

    def __init__(self) -> None:
        self.read = self.refused = 0

    def __call__(self, work: Any, seed: int) -> Any:
        started, result = time.monotonic(), None
        try:
            result = work()
            self.read += 1
        except TrtconvertError as error:
            self.refused += 1
            message = str(error)
            assert all(label in message for label in ("expected: ", "got: ", "remedy: ")) or isinstance(
                error, UserError
            ), message
            message.encode()  # it can be printed
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert time.monotonic() - started < SECONDS, f"seed {seed}"
        return result


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 5, 65, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), -float("inf")),
    *("", " ", ".", "..", "/", "../x", "/etc/passwd", "a/../b", "a//b", "x\ny", "\t", "é", "😀", "\x1b[31m", "x" * 300),
    *("nan", "1", "true", "off", "null", "~", "2026-01-01", "*", "denoise", "a:b", "manifest.json", "denoiser.onnx"),
    *([], [[]], [None], [1, 2, 3], ["a"], [65], {}, {"a": 1}, {"": {}}, {"tensor": "x"}, [{"x": []}]),
)
"""Values that hardly anything expects, of every type of JSON."""

TOKENS = (
    *(
        "? ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a ",
        "*a",
        "<<: ",
        "<<: *a",
        "!!set ",
        "!!omap ",
        "!!pairs ",
        "!!int ",
    ),
    *(
        "!!binary ",
        "!x ",
        "'",
        '"',
        "|\n",
        ">\n",
        "#",
        "\n",
        "\t",
        "  ",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "\\u0000",
        "\x00",
    ),
    *(
        "\\uD800",
        ".nan",
        ".inf",
        "1e999",
        "0x" + "f" * 400,
        "9" * 5000,
        "~",
        "!!null",
        "2026-02-30",
        "{? " * 20,
        "[" * 50,
    ),
)
"""Characters with a meaning in YAML, and some without."""


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every node of a JSON value but the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from places(inner, (*above, key))


def mutated(value: Any, generator: random.Random) -> Any:
    """The same with one node replaced, removed, doubled, renamed, or swapped with another."""
    changed = copy.deepcopy(value)
    paths = list(places(changed))
    if not paths:
        return generator.choice(ODD)
    *above, last = generator.choice(paths)
    node = changed
    for key in above:
        node = node[key]
    match generator.randrange(6):
        case 0 | 1:
            node[last] = copy.deepcopy(generator.choice(ODD))
        case 2:
            del node[last]
        case 3 if isinstance(node, list):
            node.insert(last, node[last])
        case 3 | 4 if isinstance(node, dict):
            node[generator.choice([str(last) + "x", "", "modes", *map(str, node)])] = node.pop(last)
        case _:
            other = value
            for key in generator.choice(paths):
                other = other[key]
            node[last] = copy.deepcopy(other)
    return changed


def garbled(text: str, generator: random.Random) -> str:
    """A text with a piece removed, doubled or moved, or with a token of YAML put somewhere."""
    at, end = sorted(generator.randrange(len(text) + 1) for _ in range(2))
    end = min(end, at + 40)
    match generator.randrange(5):
        case 0:
            return text[:at] + text[end:]
        case 1:
            return text[:end] + text[at:]
        case 2:
            return text[:at] + text[end:] + text[at:end]
        case _:
            return text[:at] + generator.choice(TOKENS) + text[at:]


def damage_file(path: Path, others: list[Path], generator: random.Random, *, devices: bool = True) -> None:
    """Do to a file what disks, copies and people do.

    Args:
        devices: whether a link to a device may take its place. Not where the damaged file is written again: with a fault there
            a test that root runs would replace the machine's device.
    """
    targets = [path.name, "nowhere", *(["/dev/zero", "/dev/null"] if devices else [])]
    content = path.read_bytes()
    place = generator.randrange(len(content))
    kinds: list[Callable[[], object]] = [
        lambda: path.write_bytes(content[:place]),
        lambda: path.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << generator.randrange(8))]) + content[place + 1 :]
        ),
        lambda: path.write_bytes(content + bytes(generator.randrange(1, 5000))),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(generator.choice(others).read_bytes()),
        lambda: path.unlink(),
        lambda: (path.unlink(), path.mkdir()),
        lambda: (path.unlink(), os.mkfifo(path)),
        lambda: (path.unlink(), path.symlink_to(generator.choice(targets))),
        lambda: os.truncate(path, generator.choice([10**13, len(content) + 1])),
    ]
    generator.choice(kinds)()


def fresh_copy(source: Path, target: Path) -> Path:
    """Replaces a folder by a copy of another."""
    if target.exists():
        shutil.rmtree(target)
    return shutil.copytree(source, target)


def seal(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest whose digest fits it, whatever it says."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    path = folder / MANIFEST
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(rest | {"digest": digest}))
