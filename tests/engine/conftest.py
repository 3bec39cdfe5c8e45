"""Shared fixtures of the engine tests."""

from __future__ import annotations

import functools
import signal

import pytest


@pytest.fixture
def at_ctrl_c():
    """Sets the handler of Ctrl-C: background processes ignore it."""
    before = signal.getsignal(signal.SIGINT)
    yield functools.partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)
