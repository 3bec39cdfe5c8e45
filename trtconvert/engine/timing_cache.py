"""TensorRT's timing cache: kernel timings of earlier builds on this GPU."""

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
    """Returns the file for a GPU and a version of TensorRT, None without a cache folder."""
    return timing_path(f"{gpu} tensorrt {version}", ".cache")


def load_timings(config: Any, path: Path, notice: Callable[[str], None]) -> bytes:
    """Loads the timings of earlier builds into a builder's configuration. Notifies about unusable timings and starts empty.

    Returns:
        The loaded content of the file, empty if nothing was loaded.
    """
    stored = _read(path, notice)
    if config.set_timing_cache(config.create_timing_cache(stored), False):
        return stored
    notice(f"the timing cache {path} belongs to another GPU or TensorRT: it is not used, and this build takes longer")
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return b""


def store_timings(config: Any, path: Path, loaded: bytes, notice: Callable[[str], None]) -> None:
    """Writes the timings of this build to the file, under a lock. Notifies if the file cannot be written.

    Args:
        loaded: returned by `load_timings`. The file is merged only if another build has written it since: TensorRT's merge takes
            long, and prints a line for each difference.
    """
    cache = config.get_timing_cache()
    try:
        with one_at_a_time(path):
            stored = _read(path, notice)
            if stored and stored != loaded:
                # Fails for the cache of another GPU, which is replaced.
                cache.combine(config.create_timing_cache(stored), False)
            content = bytes(cache.serialize())
            with whole_file(path) as partial:
                partial.write_bytes(hashlib.sha256(content).digest() + content)
    except (OSError, UserError) as error:
        notice(f"the timing cache is not kept, the next build takes as long: {first_line(error)}")


def _read(path: Path, notice: Callable[[str], None]) -> bytes:
    """Reads the cache of a file, empty if there is none. TensorRT does not check caches: the digest does."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        notice(f"the timing cache {path} cannot be read ({error.strerror}): this build takes longer")
        return b""
    digest, cache = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cache).digest() != digest:
        notice(f"the timing cache {path} is damaged: it is not used, and this build takes longer")
        return b""
    return cache
