"""The build cache: a stage runs again if its inputs changed or its files are damaged."""

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from types import SimpleNamespace

import pytest
from support import REPOSITORY, contents, partials

from trtconvert import cache as cache_module
from trtconvert.cache import Cache, default_folder
from trtconvert.calib import identity as calib_identity
from trtconvert.calib.identity import search_reads
from trtconvert.doctor import examine
from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.evaluate.features import load_extractor
from trtconvert.files import locked
from trtconvert.models.identity import identity
from trtconvert.recipe import ModelSection, PlanSection

CODE = ["trtconvert.cache"]
MADE = {"a.bin": b"\x00\x01", "b.txt": b"text"}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def make(folder):
    for name, content in MADE.items():
        (folder / name).write_bytes(content)


def must_not_be_made(_):
    pytest.fail("the stage was made again")


def test_a_stage_is_made_once(cache):
    first = cache.stage("one", CODE, {"x": 1, "y": [2]}, make)
    second = cache.stage("one", CODE, {"y": [2], "x": 1}, must_not_be_made)
    assert (first.reused, second.reused) == (False, True)
    assert first.key == second.key
    assert {name: data for name, data in contents(second.folder).items() if name in MADE} == MADE


@pytest.mark.parametrize(("name", "reads"), [("one", {"x": 2}), ("one", {"x": 1, "y": None}), ("two", {"x": 1})])
def test_another_name_or_other_reads_are_another_stage(cache, name, reads):
    first = cache.stage("one", CODE, {"x": 1}, make)
    second = cache.stage(name, CODE, reads, make)
    assert not second.reused
    assert first.key != second.key and first.folder != second.folder


def test_leftovers_of_killed_processes_in_other_stages_are_removed(cache):
    """Their inputs will not come again, for example after an option that ran out of memory."""
    cache.folder.mkdir()
    killed, running = (cache.folder / f".engine-{name}.partial-8letters" for name in ("killed", "running"))
    for folder in (killed, running):
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(100))
    with locked(running):
        stage = cache.stage("one", CODE, {}, make)
    assert sorted(cache.folder.iterdir()) == sorted([running, stage.folder])


def test_other_code_is_another_stage(cache, monkeypatch):
    cache.stage("one", CODE, {"x": 1}, make)
    monkeypatch.setattr(cache_module, "code_identity", lambda *_: "of another version")
    assert not cache.stage("one", CODE, {"x": 1}, make).reused


def damage(folder, how):
    path = folder / "a.bin"
    if how == "altered":
        path.write_bytes(b"\x00\x02")
    elif how == "truncated":
        path.write_bytes(b"\x00")
    elif how == "missing":
        path.unlink()
    elif how == "no index":
        (folder / "stage.json").unlink()
    elif how == "index cut off":
        (folder / "stage.json").write_text('{"a.bin": "')
    elif how == "index of another kind":
        (folder / "stage.json").write_text(json.dumps(["a.bin"]))


@pytest.mark.parametrize(
    "how", ["altered", "truncated", "missing", "no index", "index cut off", "index of another kind"]
)
def test_a_damaged_stage_is_made_again(cache, how):
    folder = cache.stage("one", CODE, {}, make).folder
    damage(folder, how)
    again = cache.stage("one", CODE, {}, make)
    assert not again.reused
    assert cache.stage("one", CODE, {}, must_not_be_made).reused
    assert contents(folder)["a.bin"] == MADE["a.bin"]


def test_a_stage_that_fails_leaves_nothing_and_can_be_made_later(cache):
    def fail(folder):
        make(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.stage("one", CODE, {}, fail)
    assert contents(cache.folder) == {}
    assert partials(cache.folder) == []
    assert not cache.stage("one", CODE, {}, make).reused


def test_the_default_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trtconvert"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_folder()) == "/home/someone/.cache/trtconvert"
    monkeypatch.setenv("XDG_CACHE_HOME", "some/where")
    assert str(default_folder()) == "/home/someone/.cache/trtconvert"


def test_a_cache_that_cannot_be_written_is_found_by_the_doctor(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert examine()[-1].good and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = examine()[-1]
    assert found.what == "cache" and not found.good
    assert "cannot write" in found.detail and "XDG_CACHE_HOME" in found.remedy


NO_PART = {
    "click", "filelock", "pydantic", "ruamel.yaml", "rich", "jinja2", "safetensors", "scikit-learn", "cuda-bindings",
    "accelerate",
}  # fmt: skip
"""Dependencies that no stage's outcome depends on: they read, show or carry; the digits that scikit-learn has are hashed."""


def test_every_library_that_a_stage_computes_with_is_part_of_its_key(monkeypatch):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["evaluate"], *extras["diffusers"]]
    names = {re.split("[ <>=!~;[]", name)[0] for name in asked} - NO_PART
    assert {"torch", "onnx-ir", "transformers", "scipy", "torch-fidelity"} <= names
    before = cache_module.code_identity.__wrapped__(*CODE)
    version = importlib.metadata.version
    for name in names:
        monkeypatch.setattr(
            importlib.metadata, "version", lambda asked, name=name: "0" if asked == name else version(asked)
        )
        assert cache_module.code_identity.__wrapped__(*CODE) != before, name


def test_the_shipped_classifier_is_part_of_a_search_s_key(monkeypatch, tmp_path):
    section = PlanSection(features="digits-classifier")
    before = search_reads(section)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"trained anew")
    monkeypatch.setattr(calib_identity, "classifier_weights", lambda name: other)
    assert search_reads(section) != before


def test_an_extractor_s_own_file_is_part_of_a_search_s_key(monkeypatch, tmp_path):
    """The same for the files of an evaluation, even if another file than the named module has the code."""
    written = tmp_path / "an_extractor.py"
    written.write_text("def pixels(images):\n    return images.flatten(1)\n")
    (tmp_path / "named_here.py").write_text("from an_extractor import pixels\n")
    monkeypatch.syspath_prepend(tmp_path)
    section = PlanSection(features="named_here:pixels")
    before = search_reads(section)
    assert before == search_reads(section) and before["extractor"] == load_extractor("named_here:pixels").identity
    written.write_text(written.read_text().replace("images.flatten(1)", "images.flatten(1) / 2"))
    assert search_reads(section)["extractor"] == load_extractor("named_here:pixels").identity != before["extractor"]


OWN_MODEL = {
    "ownmodel/__init__.py": "",
    "ownmodel/load.py": "from . import parts\nfrom .nets.net import Net\n\ndef load(): ...\n",
    "ownmodel/parts.py": "def part():\n    import beside\n",
    "ownmodel/nets/net.py": "from ..common import SCALE\nimport spaced.inner\n\nclass Net: ...\n",
    "ownmodel/common.py": "SCALE = 1\n",
    "ownmodel/train.py": "import ownmodel.load\n",
    "beside.py": "import torch, nowhere\n",
    "spaced/inner.py": "",
    "unrelated.py": "",
}
"""A user's model in a package with one folder without __init__.py, and beside the package."""


def test_the_code_that_a_model_imports_is_part_of_its_identity(monkeypatch, tmp_path):
    for name, text in OWN_MODEL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    section = ModelSection(source="ownmodel.load:load")
    first = identity(section)
    assert identity(section) == first
    for name in OWN_MODEL:
        changed = tmp_path / name
        changed.write_text(OWN_MODEL[name] + "# changed\n")
        counts = name not in ("ownmodel/train.py", "unrelated.py")
        assert (identity(section) != first) == counts, name
        changed.write_text(OWN_MODEL[name])
    (tmp_path / "ownmodel" / "common.py").write_text("no Python (")
    assert identity(section) != first


def test_a_models_own_package_is_part_of_its_identity(monkeypatch, tmp_path):
    place = tmp_path / "libraries"
    (place / "otherlib-1.0.dist-info").mkdir(parents=True)
    for name, text in {"ownlib/__init__.py": "import otherlib\n", "otherlib.py": ""}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.syspath_prepend(place)
    first = source_identity("ownlib:load")
    (place / "otherlib.py").write_text("# changed\n")
    assert source_identity("ownlib:load") == first
    (place / "ownlib" / "__init__.py").write_text("# changed\n")
    assert source_identity("ownlib:load") != first != source_identity("nowhere:load") == ""


def test_a_package_in_a_folder_of_another_name_and_what_is_compiled_are_part_of_it(monkeypatch, tmp_path):
    """Like editable installs."""
    package, compiled = tmp_path / "lib", tmp_path / "lib" / "native.so"
    package.mkdir()
    for name, text in {"__init__.py": "", "load.py": "from . import net\n", "net.py": ""}.items():
        (package / name).write_text(text)
    compiled.write_bytes(b"1")
    where = {"mapped.load": package / "load.py", "mapped.native": compiled}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(where[name])))
    for name, changed in (("mapped.load", package / "net.py"), ("mapped.native", compiled)):
        before = source_identity(f"{name}:load")
        changed.write_bytes(b"# 2")
        assert source_identity(f"{name}:load") != before


def test_a_file_that_an_option_names_is_part_of_a_model_s_identity(tmp_path):
    checkpoint = tmp_path / "w.pt"
    section = ModelSection(source="tiny_models:build", options={"paths": [{"checkpoint": str(checkpoint)}], "width": 4})
    without = identity(section)
    found = []
    for content in (b"1", b"2"):
        checkpoint.write_bytes(content)
        found.append(identity(section))
    assert len({without, *found}) == 3


def test_an_extractor_that_cannot_be_imported_is_named_before_anything_is_done():
    with pytest.raises(UserError, match=r"(?s)the feature extractor 'tiny_features:missing' cannot be imported"):
        search_reads(PlanSection(features="tiny_features:missing"))
