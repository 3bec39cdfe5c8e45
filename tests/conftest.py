"""How tests are collected, and where their fixtures come from."""

import gc
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

NO_GPU = "needs an NVIDIA GPU, and torch sees none"


def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        return  # xdist's workers run the tests: this process would import torch before it starts them
    # Imports and exports make millions of objects that stay: Python would search them for garbage again and again.
    gc.set_threshold(100_000, 20, 20)
    config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_finish():
    gc.freeze()  # what was imported is searched no more


def pytest_unconfigure():
    gc.unfreeze()  # nanobind would print all types that are left at the end


class ModuleOfGpuTests(pytest.Module):
    """A module that is imported, so that its mistakes show, and skipped as a whole: thousands of skipped tests take time."""

    def collect(self):
        _ = self.obj
        pytest.skip(f"{self.nodeid}: {NO_GPU}", allow_module_level=True)


def sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent):
    if Path(__file__).with_name("gpu") in module_path.parents and not sees_a_gpu():
        return ModuleOfGpuTests.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    # Files with slow tests come first: at the end of a run, one of them would leave the other workers idle.
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if "slow" in item.keywords}
        items.sort(key=lambda item: item.path not in slow)
    cases = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        one_in = item.get_closest_marker("one_in")
        if cases[test] % (one_in.args[0] if one_in else 1) or (cases[test] and "first_case" in item.keywords):
            item.add_marker(pytest.mark.soak)
        cases[test] += 1
        for package, oldest in (mark.kwargs if (mark := item.get_closest_marker("as_of")) else {}).items():
            older = Version(version(package)) < Version(oldest)
            item.add_marker(pytest.mark.skipif(older, reason=f"as {package} {oldest} has it"))
    if sees_a_gpu():
        return
    skip = pytest.mark.skip(reason=NO_GPU)
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    return (yield from _skipped_if_older())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup():
    return (yield from _skipped_if_older())


def _skipped_if_older():
    """Skips what needs a class that the installed diffusers lacks, if diffusers is older than in constraints.txt."""
    try:
        return (yield)
    except (AttributeError, ModuleNotFoundError) as error:
        if re.search(r"module 'diffusers\.|module diffusers has no attribute", str(error).replace("named ", "module ")):
            constraints = Path(__file__).parents[1].joinpath("constraints.txt").read_text()
            if f"diffusers=={version('diffusers')}\n" not in constraints:
                pytest.skip(f"diffusers {version('diffusers')}: {error}")
        raise
