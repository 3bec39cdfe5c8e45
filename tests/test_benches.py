"""Scripts in bench/ import existing names of the package. Their other dependencies may be missing."""

from __future__ import annotations

import json
import subprocess
import sys

from support import REPOSITORY

IMPORTING = """
import importlib.util, json, pathlib, sys
sys.path.insert(0, "bench")
found = {}
for file in sorted(pathlib.Path("bench").glob("*.py")):
    spec = importlib.util.spec_from_file_location("bench_" + file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] == "trtconvert":
            found[file.name] = str(error)
    except ImportError as error:
        found[file.name] = str(error)
print(json.dumps(found))
"""


def test_benches_import_what_there_is():
    run = subprocess.run([sys.executable, "-c", IMPORTING], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {}
