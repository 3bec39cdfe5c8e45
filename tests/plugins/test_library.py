"""The shared library as the package finds it, and what `trtconvert doctor` says of it."""

import ctypes

import pytest

from trtconvert import cache, doctor, library
from trtconvert.engine.timing_cache import timing_cache_path
from trtconvert.errors import BackendUnavailable, UserError

WHEEL = ("80", "86", "90a", "120")


@pytest.mark.skipif(library.library_path() is None, reason="no library is installed; 'pip install .' builds it")
def test_the_library_tells_its_version_and_what_it_was_compiled_for():
    assert library.library_version().count(".") == 2
    compiled = library.compiled_architectures()
    assert compiled and set(compiled) <= set(WHEEL)


@pytest.mark.parametrize(
    ("gpu", "compiled", "runs"),
    [
        ("sm75", WHEEL, False),
        ("sm80", WHEEL, True),
        ("sm89", WHEEL, True),
        ("sm100", WHEEL, True),  # from the PTX for 8.6
        ("sm90", ("90a",), True),
        ("sm100", ("90a",), False),
        ("sm89", ("90a",), False),
        ("sm80", ("86",), False),
    ],
)
def test_kernels_run_on_the_gpus_that_they_were_compiled_for_and_later_ones(gpu, compiled, runs):
    assert library.serves(gpu, compiled) == runs


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """What `doctor` says of the library on a machine with a GPU and a library that are not there."""

    def finding(gpu, compiled=WHEEL):
        monkeypatch.setattr(doctor, "device_architecture", lambda: gpu)
        monkeypatch.setattr(doctor, "device_name", lambda: "NVIDIA X")
        monkeypatch.setattr(doctor, "library_path", lambda: tmp_path / "libtrtconvert.so")
        monkeypatch.setattr(doctor, "compiled_architectures", compiled if callable(compiled) else lambda: compiled)
        return next(found for found in doctor.examine() if found.what == "kernels and plugin")

    return finding


@pytest.mark.parametrize("gpu", [None, "sm90"])
def test_doctor_names_what_the_library_was_compiled_for(machine, gpu):
    found = machine(gpu)
    assert found.good and found.detail == "libtrtconvert.so for sm_80, sm_86, sm_90a, sm_120" and not found.remedy


@pytest.mark.parametrize(
    ("gpu", "compiled", "remedy"),
    [("sm75", WHEEL, "engine.attention: native"), ("sm89", ("90a",), "TRTCONVERT_CUDA_ARCHITECTURES")],
)
def test_doctor_says_that_the_library_has_no_kernels_for_the_gpu(machine, gpu, compiled, remedy):
    found = machine(gpu, compiled)
    assert found.good is False and f"not {gpu}" in found.detail and remedy in found.remedy


def test_doctor_says_that_the_library_does_not_load(machine):
    def broken():
        raise BackendUnavailable("the kernel library does not load", got="file too short", remedy="install it again")

    found = machine(None, broken)
    assert (found.good, found.detail, found.remedy) == (False, "file too short", "install it again")


def test_a_library_of_an_older_version_is_named(monkeypatch):
    monkeypatch.setattr(
        library, "load_library", lambda: ctypes.CDLL(None)
    )  # what the process has, without our functions
    with pytest.raises(BackendUnavailable, match=r"(?s)older than.*got: .*trtconvert_compiled_arch.*remedy: "):
        library.compiled_architectures()


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    """As in a container that runs as some user of its own."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", homeless)
    with pytest.raises(UserError, match=r"(?s)no folder for the build cache.*got: Could not.*XDG_CACHE_HOME"):
        cache.default_folder()
    found = next(found for found in doctor.examine() if found.what == "cache")
    assert found.good is False and "XDG_CACHE_HOME" in found.remedy
    assert timing_cache_path("NVIDIA H200", "10.6.0") is None  # builds go on without
