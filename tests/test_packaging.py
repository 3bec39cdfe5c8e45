"""Packages: the sdist, the shipped recipes, the container images, and supported systems."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support import REPOSITORY, refusal, run

from trtconvert.recipe import load_recipe
from trtconvert.shipped import shipped_models

DOCKERFILE = REPOSITORY / "Dockerfile"
BESIDE_PYTHON = Path(sys.executable).parent


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist, unpacked."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "-o",
        folder,
        "-s",
        REPOSITORY,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return archive.with_suffix("").with_suffix("")


def in_git(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no git checkout")
def test_the_sdist_has_every_source_and_nothing_that_was_built(sdist):
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    there = {name for name in in_git("trtconvert", "plugins", "recipes") if (REPOSITORY / name).exists()}
    assert there <= packed
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".pyc")) or name.startswith((".", "out/", "build/"))]


def test_the_sdist_has_what_cmake_names(sdist):
    text = (sdist / "CMakeLists.txt").read_text(encoding="utf-8")
    variables = dict(re.findall(r"set\((\w+) \$\{CMAKE_CURRENT_SOURCE_DIR\}/(\S+)\)", text))
    named = re.findall(r"(?:\$\{(\w+)\}/|(plugins/))([\w/]+\.(?:cpp|cu\.in|cu))", text)
    places = [f"{variables[name]}/{file}" if name in variables else prefix + file for name, prefix, file in named]
    assert len(places) > 20
    assert [place for place in places if not (sdist / place).is_file()] == []


def configured(folder: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake", path=BESIDE_PYTHON) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("no CMake")
    command = [cmake, "-S", str(folder), "-B", str(tmp_path / "build"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_library_that_was_compiled_before_is_installed_as_it_is(sdist, tmp_path):
    library = tmp_path / "made.so"
    library.write_bytes(b"compiled")
    done = configured(sdist, tmp_path, f"-DTRTCONVERT_LIBRARY={library}", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'to'}")
    assert not done.returncode, done.stderr
    cmake = shutil.which("cmake", path=BESIDE_PYTHON) or "cmake"
    subprocess.run([cmake, "--install", str(tmp_path / "build")], check=True, capture_output=True)
    assert (tmp_path / "to" / "trtconvert" / "lib" / "libtrtconvert.so").read_bytes() == b"compiled"


def test_a_library_that_is_not_there_is_told_before_anything_is_compiled(sdist, tmp_path):
    done = configured(sdist, tmp_path, "-DTRTCONVERT_LIBRARY=/not/there.so")
    assert done.returncode and "TRTCONVERT_LIBRARY names no file: /not/there.so" in " ".join(done.stderr.split())


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems_are_told_so_at_the_import(system):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.platform = '{system}'; import trtconvert.cli"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"ImportError: trtconvert runs on Linux only\n  expected: linux\n  got: {system}\n  remedy: " in done.stderr


def test_models_that_come_with_the_program_have_recipes_and_weights(tmp_path):
    assert "digits-dit" in shipped_models()
    for name in shipped_models():
        recipe = tmp_path / f"{name}.yaml"
        assert run("init", name, "-o", recipe).exit_code == 0
        written = load_recipe(recipe)
        assert written.model.weights is not None and written.model.weights.is_file()
        assert written.plan.features_weights is None or written.plan.features_weights.is_file()


def test_names_of_models_that_do_not_come_with_it_are_told_what_to_do(tmp_path):
    refusal(run("build", "sdxl"), "there is no recipe sdxl", "digits-dit", "the name of SDXL", "trtconvert init sdxl")
    refusal(run("build", "digitsdit"), "there is no recipe digitsdit", "did you mean 'digits-dit'?")
    refusal(run("init", "digits-dit", "--lora", DOCKERFILE, "-o", tmp_path / "r.yaml"), "digits-dit takes no --lora")


def test_the_dockerfile_is_clean():
    hadolint = shutil.which("hadolint", path=BESIDE_PYTHON)
    if hadolint is None:
        pytest.skip("no hadolint")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


def test_files_that_the_dockerfile_copies_exist_and_are_not_ignored():
    text = DOCKERFILE.read_text(encoding="utf-8")
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied and copied <= kept
    assert [name for name in kept if not (REPOSITORY / name).exists()] == []


def test_the_images_install_extras_that_there_are():
    import tomllib

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name for group in re.findall(r"\$\{wheel\}\[([\w,]+)\]", DOCKERFILE.read_text()) for name in group.split(",")
    }
    assert named and named <= set(extras)
