"""The documentation site in a browser of 1,400 pixels: no clipped content, no network access, a working search."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import REPOSITORY

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

_CLIPPED = """[...document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset table")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60)).join("; ")"""
_BROKEN = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src).join('; ')"
_FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.getAttribute('href')).join(' ')"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_is_clipped_and_none_asks_the_network(site, page):
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) > 50
    problems = list[str]()
    for path in pages:
        page.open(path, 1400)
        problems += [f"{path.name}: {found}" for found in (page.evaluate(_CLIPPED), page.evaluate(_BROKEN)) if found]
        inside = (site.as_uri(), "data:")
        problems += [f"{path.name}: asks {url}" for url in page.requests() if not url.startswith(inside)]
    assert problems == []


@pytest.mark.parametrize("served", [False, True], ids=["from a folder", "over HTTP"])
def test_the_search_finds(site, page, served):
    if served:
        handler = functools.partial(_Quiet, directory=str(site))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = f"http://127.0.0.1:{server.server_port}"
    else:
        server, start = None, site.as_uri()
    try:
        page.call("Page.navigate", url=f"{start}/index.html?q=set_loras")
        deadline = time.monotonic() + 30
        while not (found := str(page.evaluate(_FOUND) or "")) and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
    assert f"{start}/loras.html" in found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
