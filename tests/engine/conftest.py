"""Fixtures that several tests of engines share."""

from __future__ import annotations

import functools
import signal

import pytest


@pytest.fixture
def at_ctrl_c():
    """Sets what Ctrl-C does; a process in the background ignores it."""
    before = signal.getsignal(signal.SIGINT)
    yield functools.partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)
