"""No imports upwards: every module of the package has a layer, and imports only from its layer and lower ones."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY

LAYERS: tuple[set[str], ...] = (
    {"__main__"},
    {"cli"},
    {"serving"},
    {"pipeline", "compile", "summary", "doctor", "starter", "optimization"},
    {"stages", "forecast"},
    {"modiff"},
    {"evaluate"},
    {"calib"},
    {"models"},
    {"runtime"},
    {"engine"},
    {"export"},
    {"diffusion_model"},
    {"quant"},
    {"attention", "linear", "weights", "reuse"},
    {
        "bars",
        "bundle",
        "c_structs",
        "cache",
        "convolutions",
        "data_flow",
        "documents",
        "early",
        "entry_point",
        "errors",
        "fake_tensors",
        "files",
        "guidance",
        "images",
        "imports",
        "interception",
        "library",
        "locks",
        "manifest_checks",
        "mixed_types",
        "noise_input",
        "noted",
        "progress",
        "provenance",
        "recipe",
        "shipped",
        "unfused",
        "wide_weights",
        "wrapped",
    },
)
"""From the top: modules and folders of the package. Those of one layer may import each other."""
LEVEL = {name: -row for row, names in enumerate(LAYERS) for name in names}
APART = {("calib", "export")}
"""Modules that must not import each other, although the order would allow one way."""

STAGES: tuple[set[str], ...] = (
    {"ahead"},
    {
        "calibrate",
        "component_errors",
        "components",
        "engines",
        "errors",
        "export",
        "gates",
        "plan",
        "reference",
        "search",
        "steps",
        "verify",
    },
    {"converted", "onnx_files", "records"},
    {"build", "results", "shapes"},
    {"common"},
)
"""From the top: the modules of `stages`. Modules of one layer do not import each other, as a stage's key
holds every module that the stage imports."""

PACKAGE = REPOSITORY / "trtconvert"
SOURCES = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def place_of(module: str) -> str:
    """Return the module or folder of the package that a dotted name lies in; empty for the package itself."""
    return module.partition("trtconvert.")[2].partition(".")[0]


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield each line that imports a module of ours, with the module's place."""
    for line, name in modules(source):
        if name.startswith("trtconvert.") and name != "trtconvert.__version__":
            yield line, place_of(name)


@functools.cache
def modules(source: str) -> list[tuple[int, str]]:
    """Return each line that imports a module, with the full name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name) for name in names]
    return found


def upwards(place: str, source: str) -> list[str]:
    """Return the imports of a module that its place forbids."""
    return [
        f"line {line} imports {other}, which lies above {place}"
        if LEVEL[other] > LEVEL[place]
        else f"line {line} imports {other}, which {place} has to do without"
        for line, other in imported(source)
        if LEVEL[other] > LEVEL[place] or {(place, other), (other, place)} & APART
    ]


def test_every_module_has_one_place():
    places = {path.parts[0].removesuffix(".py") for path in SOURCES} - {"__init__"}
    assert places - LEVEL.keys() == set(), "these are missing in LAYERS"
    assert len(LEVEL) == sum(map(len, LAYERS))


def test_no_module_imports_upwards():
    found = []
    for path, source in SOURCES.items():
        if path == Path(
            "__init__.py"
        ):  # every import of ours runs it first; `optimize` it imports when it is asked for
            others = [(line, other) for line, other in imported(source) if other != "optimization"]
            found += [f"{path}: line {line} imports {other}" for line, other in others]
        else:
            found += [f"{path}: {one}" for one in upwards(path.parts[0].removesuffix(".py"), source)]
    assert found == []


def test_no_stage_imports_another_one():
    level = {name: row for row, names in enumerate(STAGES) for name in names}
    sources = {path.stem: source for path, source in SOURCES.items() if path.parts[0] == "stages"}
    assert sources.keys() == level.keys() | {"__init__"}
    assert not [*imported(sources.pop("__init__"))], "the package runs in every stage"
    for name, source in sources.items():
        lower = {other for other, row in level.items() if row > level[name]}
        others = {module.split(".")[2] for _, module in modules(source) if module.startswith("trtconvert.stages.")}
        assert others <= lower, name


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("export", "from trtconvert.models.denoiser import intercepted"),
        ("models", "from trtconvert import evaluate"),
        ("models", "import trtconvert.evaluate.metrics as metrics"),
        ("runtime", "def load():\n    from trtconvert.calib.plan import Plan"),
        ("recipe", "if TYPE_CHECKING:\n    from trtconvert.attention.modes import Mode"),
        ("calib", "from trtconvert.export.trace import trace"),
    ],
)
def test_imports_against_the_order_are_found(place: str, source: str):
    assert len(upwards(place, source)) == 1
    assert upwards("cli", source) == []
