"""TensorRT's timing cache: what earlier builds measured of each kernel on this GPU, so that later builds need not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtconvert.cache import timing_path
from trtconvert.errors import UserError, first_line
from trtconvert.files import one_at_a_time, whole_file

_DIGEST_BYTES = hashlib.sha256().digest_size


def timing_cache_path(gpu: str, version: str) -> Path | None:
    """Where the timings of one kind of GPU and one version of TensorRT are kept; None for a user without a cache folder."""
    return timing_path(f"{gpu} tensorrt {version}", ".cache")


def load_timings(config: Any, path: Path, notice: Callable[[str], None]) -> None:
    """Give a builder's configuration the timings of earlier builds. Where there are none, or none that can be used, it
    starts without, after a notice in the second case.
    """
    if not config.set_timing_cache(config.create_timing_cache(_read(path, notice)), False):
        notice(
            f"the timing cache {path} belongs to another GPU or TensorRT: it is left out, and this build takes longer"
        )
        config.set_timing_cache(config.create_timing_cache(b""), False)


def store_timings(config: Any, path: Path, notice: Callable[[str], None]) -> None:
    """Add what this build has measured to the file. Builds that end at the same time lose nothing of each other; where the
    file cannot be written there is a notice.
    """
    cache = config.get_timing_cache()
    try:
        with one_at_a_time(path):
            if stored := _read(path, notice):
                # False where the stored one belongs to another GPU: it is replaced.
                cache.combine(config.create_timing_cache(stored), False)
            content = bytes(cache.serialize())
            with whole_file(path) as partial:
                partial.write_bytes(hashlib.sha256(content).digest() + content)
    except (OSError, UserError) as error:
        notice(f"the timing cache is not kept, the next build takes as long: {first_line(error)}")


def _read(path: Path, notice: Callable[[str], None]) -> bytes:
    """The cache in a file, empty where there is none. The library does not check what it is given, so the digest does."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        notice(f"the timing cache {path} cannot be read ({error.strerror}): this build takes longer")
        return b""
    digest, cache = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cache).digest() != digest:
        notice(f"the timing cache {path} is damaged: it is dropped, and this build takes longer")
        return b""
    return cache
