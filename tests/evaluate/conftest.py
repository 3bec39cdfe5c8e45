"""Fixtures that tests of evaluations and reports share."""

import pytest
from browser import Page, chromium


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    executable = chromium()
    if executable is None:
        pytest.skip("needs Chromium, and there is none (Debian: apt-get install chromium)")
    page = Page(executable, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()
