"""The code in a stage's key: everything that decides the stage's result, and no more."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import HELPERS, REPOSITORY, environment, run, tiny_recipe

from trtconvert import imports
from trtconvert.cache import Cache
from trtconvert.entry_point import names_of_ours
from trtconvert.imports import code_hash, code_modules, imported_names

PACKAGE = REPOSITORY / "trtconvert"
SOURCES = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
ON_DEMAND = [
    "trtconvert",
    "trtconvert.attention",
    "trtconvert.models",
    "trtconvert.modiff",
    "trtconvert.runtime",
    "trtconvert.weights",
]


def parsed_names(source: str) -> set[str]:
    """Like `imported_names`, by the parser alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    nodes = [inner for node in tree.body if getattr(node, "name", "") != "__getattr__" for inner in ast.walk(node)]
    found = {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    found |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    texts = {n.value.partition(":")[0] for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    found |= {text for text in texts if not text.endswith(".") and text.replace(".", "").isidentifier()}
    return {name for name in found if name.startswith("trtconvert.")}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_import_is_overlooked(path):
    assert parsed_names(SOURCES[path]) <= imported_names(SOURCES[path])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from trtconvert.a import (\n    b,  # as (so)\n    c,\n)\n", {"trtconvert.a.b", "trtconvert.a.c"}),
        ("def f():\n    import trtconvert.a as a\n", {"trtconvert.a"}),
        ("import trtconvert.a\n", {"trtconvert", "trtconvert.a"}),
        ("import_module('trtconvert.a')\nX = 'trtconvert.b.c:function'\n", {"trtconvert.a", "trtconvert.b.c"}),
        (
            "if TYPE_CHECKING:\n    from trtconvert.a import b\n\n    import trtconvert.c as c\nimport trtconvert.d as d\n",
            {"trtconvert.d"},
        ),
        ('"""What\nfrom trtconvert comes."""\nfrom trtconvert.a import b\n', {"trtconvert.a.b"}),
        ("import torch\nfrom other.trtconvert import a\n", set()),
    ],
)
def test_statements_that_count_as_imports(source, names):
    assert imported_names(source) == names


@pytest.mark.parametrize("package", ON_DEMAND)
def test_lazy_imports_of_a_package_count_at_their_use(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        place = getattr(getattr(module, name), "__module__", package)
        assert {package, place} <= code_modules([f"{package}.{name}"]) <= code_modules([package]), name


def test_packages_that_import_on_demand_are_those_that_are_tested():
    found = {path.parent for path, source in SOURCES.items() if "\ndef __getattr__(" in source}
    assert {Path(*name.split(".")[1:]) for name in ON_DEMAND} == found


def test_an_entry_point_adds_what_it_imports_of_the_package(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("from beside import Net\n")
    (tmp_path / "beside.py").write_text("from trtconvert.attention import Int8Attention\nimport torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = names_of_ours("mine:load")
    assert names == {"trtconvert.attention.Int8Attention"}
    assert "trtconvert.attention.module" in code_modules(names) - code_modules(["trtconvert.stages.calibrate"])
    assert names_of_ours("diffusers") == names_of_ours("nowhere:load") == set()


@pytest.fixture(scope="module")
def keys(digits_build, tmp_path_factory):
    """Return the names of code in the keys of a build's stages, and of stages outside this build."""
    found = {}
    stage = Cache.stage

    def noted(self, name, code, reads, make):
        found[name] = code
        return stage(self, name, code, reads, make)

    bundle = tmp_path_factory.mktemp("keys") / "bundle"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Cache, "stage", noted)
        outcome = run("build", digits_build.recipe, "-o", bundle, "--cache", digits_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert found.keys() == {"calibrate", "plan", "reference", "export", "verify"}
    further = {
        name: {f"trtconvert.stages.{name}", "trtconvert.stages.build"}
        for name in ("components", "search", "steps", "errors")
    }
    return found | further | {"engine": {"trtconvert.stages.engines"}}


ALL = {"components", "calibrate", "search", "plan", "steps", "reference", "errors", "export", "engine", "verify"}


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("serving/front.py", set()),
        ("evaluate/report.py", set()),
        ("modiff/workspace.py", set()),
        ("calib/command.py", set()),
        ("cli.py", set()),
        ("pipeline.py", set()),
        ("stages/gates.py", set()),
        ("stages/export.py", {"export"}),
        ("stages/engines.py", {"engine"}),
        ("evaluate/grid.py", {"verify"}),
        ("export/trace.py", {"components", "export", "verify"}),
        ("evaluate/verify.py", {"reference", "errors", "verify"}),
        ("calib/calibrate.py", {"calibrate"}),
        ("engine/tensorrt_rtx.py", {"engine", "verify"}),
        ("export/lowering/layers.py", {"components", "export", "engine", "verify"}),
        ("runtime/bundles.py", {"verify"}),
        ("models/placement.py", set()),
        ("optimization.py", set()),
        ("linear/reference.py", ALL),
        ("models/diffusers.py", ALL - {"engine"}),
        ("__init__.py", ALL),
    ],
)
def test_a_comment_changes_the_keys_of_the_stages_that_import_the_file(keys, file, changed, monkeypatch):
    before = {stage: code_hash(names) for stage, names in keys.items()}
    module = "trtconvert." + file.removesuffix(".py").replace("/", ".")
    module = module.removesuffix(".__init__")
    sources = imports._sources()
    assert module in sources
    monkeypatch.setattr(imports, "_sources", lambda: {**sources, module: sources[module] + b"# a comment\n"})
    assert {stage for stage, names in keys.items() if code_hash(names) != before[stage]} == changed


def pipeline_recipe(folder: Path) -> Path:
    """A pipeline with its models, one of them with INT8 layers."""
    import converted_pipelines as converted  # which skips without diffusers

    converted.save(folder / "pipeline", "pixart")
    converted.recipe_of(folder, "pixart", {"all": {}, "text_encoder": {"layers": "int8"}})
    return folder / "recipe.yaml"


STATED = functools.partial(
    tiny_recipe, model={"source": "tiny_layers:build"}, layers={"modes": "static"}, verify={"min_psnr": 1}
)
SEARCHED = functools.partial(tiny_recipe, attention={"modes": "auto"}, plan={"samples": 1, "steps": 2, "min_psnr": 10})
SHOWN = {
    "trtconvert.progress", "trtconvert.forecast", "trtconvert.calib.frontier", "trtconvert.pipeline", "trtconvert.stages.ahead",
}  # fmt: skip
"""Modules that run in stages and decide no result. `progress` and `pipeline` show progress, `forecast` shows the cost of a build,
`calib.frontier` counts drawings for `forecast`, and `stages.ahead` starts another process."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "stages"),
    [
        (STATED, {"calibrate", "plan", "reference", "errors", "export", "verify"}),
        pytest.param(
            SEARCHED,
            {"calibrate", "search", "plan", "reference", "errors", "export", "verify"},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            pipeline_recipe,
            {"components", "export-text_encoder", "export-vae_decoder", "calibrate", "export"},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["stated", "searched", "pipeline"],
)
def test_all_that_runs_in_a_stage_is_in_its_key(tmp_path, recipe, stages):
    command = [sys.executable, HELPERS / "traced_stages.py", recipe(tmp_path), tmp_path / "out"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"stage"')]
    assert stages <= {one["stage"] for one in told}
    for one in told:
        assert f"trtconvert.stages.{one['stage'].partition('-')[0]}" in {
            *one["code"],
            "trtconvert.stages.export",
            "trtconvert.stages.verify",
        }
        reads_files_alone = one["stage"].startswith(("plan", "verify-"))
        assert "trtconvert.models" in one["ran"] or reads_files_alone
        assert {*one["ran"]} - SHOWN <= code_modules(one["code"]), one["stage"]
