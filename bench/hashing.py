"""Time of hashing one large file, and the files of a bundle: on one core, each file whole, and on all cores in parts.

python bench/hashing.py [--gigabytes 8] [--files 4] [--rounds 3] [--folder /tmp]

The bundle has one file of half the bytes, and smaller files with the other half. The files are in the page cache if the memory
holds them. Both ways take turns; the script prints medians. The last line is the time of copying the files to the same folder,
one at a time and together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trtconvert.bundle import FileRecord, Manifest, check_files, file_record
from trtconvert.files import copy_files, sha256


def write(path: Path, size: int) -> Path:
    """Writes random bytes, repeated after 16 MiB and a byte."""
    block = os.urandom(2**24 + 1)
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    return path


def manifest_of(records: dict[str, FileRecord]) -> Manifest:
    """Returns a manifest with files alone."""
    return Manifest.model_construct(files=records, components={}, pipeline="")


def compare(what: str, size: int, rounds: int, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Prints the median seconds of two ways that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for way, found in zip((before, after), times, strict=True):
            started = time.perf_counter()
            way()
            found.append(time.perf_counter() - started)
    one, all_cores = map(statistics.median, times)
    speeds = f"{size / one / 1e9:.2f} and {size / all_cores / 1e9:.2f} GB/s"
    print(f"{what}: {one:.2f} s before, {all_cores:.2f} s after, {one / all_cores:.1f} times as fast; {speeds}")


def main() -> None:
    """Reads the arguments and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    size, others = int(asked.gigabytes * 1e9), asked.files - 1
    print(f"{size / 1e9:.1f} GB in {asked.files} files; {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder = Path(place)
        sizes = [size // 2, *[size // 2 // others] * others]
        paths = [write(folder / f"{index}.bin", one) for index, one in enumerate(sizes)]
        plain = {path.name: FileRecord(size=path.stat().st_size, sha256=sha256(path)) for path in paths}
        parts = {path.name: file_record(path) for path in paths}

        def one_by_one() -> None:
            for path in paths:
                sha256(path)

        compare("one file", sizes[0], asked.rounds, lambda: sha256(paths[0]), lambda: file_record(paths[0]))
        for what, records in (("check_files", parts), ("check_files of an earlier version's bundle", plain)):
            compare(what, size, asked.rounds, one_by_one, partial(check_files, folder, manifest_of(records)))
        copies = {path.with_suffix(".copy"): path for path in paths}
        compare(
            "copies",
            size,
            asked.rounds,
            lambda: [shutil.copyfile(source, target) for target, source in copies.items()],
            lambda: copy_files(copies),
        )


if __name__ == "__main__":
    main()
