"""Random arguments to every C API and every plugin, with the library's host code under AddressSanitizer and UBSan.

`make sanitize` builds that library and the program that calls it, `sanitized/`. Its CUDA runtime needs no GPU: it takes the
launches that a driver would take, and runs none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from damage import ROUNDS
from support import REPOSITORY

FOLDER = REPOSITORY / "out" / "sanitize" / "build"
PROGRAM = FOLDER / "tests" / "robustness" / "sanitized" / "random_calls"
WITHOUT_ARGUMENTS = {"trtconvert_version", "trtconvert_compiled_architectures"}

pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="the sanitized library is not here; 'make sanitize' builds it"
)


def test_random_arguments_are_taken_or_refused():
    rounds, seed = ROUNDS or 1000, 1
    variables = os.environ | {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    ended = subprocess.run([PROGRAM, str(rounds), str(seed)], env=variables, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr[-5000:]
    counts = json.loads(ended.stdout)
    print(ended.stdout)

    exported = subprocess.run(
        ["nm", "-D", "--defined-only", FOLDER / "libtrtconvert.so"], capture_output=True, text=True
    )
    functions = set(re.findall(r"\b(trtconvert_\w+)$", exported.stdout, re.M)) - WITHOUT_ARGUMENTS
    creators = {name for name in counts if name[0].isupper() and " of " not in name}
    assert len(functions) > 15 and len(creators) == 11
    for name in functions | creators:
        assert sum(counts[name].values()) >= rounds, f"{name} was hardly called"
    for name in functions - {name for name in functions if name.endswith("_is_supported")}:
        taken = counts[name].get("0", 0)
        assert 0.1 * rounds < taken < sum(counts[name].values()), f"{name}: {counts[name]}"
    for name in creators:
        assert min(counts[name]["made"], counts[name]["refused"]) > 0.1 * rounds, f"{name}: {counts[name]}"
        assert counts[f"{name} of tensors"]["enqueued"] > 0.1 * rounds, f"{name}: no kernel was reached"
    assert counts["launches"]["taken"] > rounds and counts["found before"] == {"refused": 5}
