"""Interrupted builds, and the signal handlers afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from rtx_builds import LINEAR, Watch, build, model_of, trt

from trtconvert.engine.signals import DeferredSignals


class Interrupting(Watch):
    """Ctrl-C at the third step."""

    def share(self, detail, done):
        super().share(detail, done)
        if len(self.shares) == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_build_and_leaves_the_handler_as_it_was(at_ctrl_c):
    at_ctrl_c(signal.default_int_handler)
    whole, watch = Watch(), Interrupting()
    build(model_of(*LINEAR), watch=whole)
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert len(watch.shares) == 3 < len(whole.shares)  # the builder stopped at that step
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_build_that_is_stopped_keeps_what_it_has_measured(at_ctrl_c, tmp_path):
    at_ctrl_c(signal.default_int_handler)
    path = tmp_path / "timings.cache"
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=Interrupting(), timing_cache=path)
    watch = Watch()
    assert path.stat().st_size > 0 and build(model_of(*LINEAR), watch=watch, timing_cache=path) and not watch.notices


def test_ctrl_c_while_the_model_is_parsed_ends_the_build(at_ctrl_c, monkeypatch):
    """TensorRT's loggers lose an exception that a handler raises there."""
    at_ctrl_c(signal.default_int_handler)
    parse, watch = trt.OnnxParser.parse, Watch()

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return parse(*arguments)

    monkeypatch.setattr(trt.OnnxParser, "parse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert watch.shares == []


def test_a_handler_that_raises_nothing_ends_a_build_all_the_same(at_ctrl_c):
    heard, watch = [], Interrupting()
    at_ctrl_c(lambda *_: heard.append(True))
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert heard == [True] and len(watch.shares) == 3


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, None])
def test_signals_without_a_handler_in_python_are_left_alone(monkeypatch, handler):
    """None is a C handler, which Python could not restore."""
    taken = []
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    monkeypatch.setattr(signal, "signal", lambda *arguments: taken.append(arguments))
    with DeferredSignals() as signals:
        pass
    assert taken == [] and signals.caught is None


def test_ctrl_c_that_is_ignored_ends_no_build(at_ctrl_c):
    at_ctrl_c(signal.SIG_IGN)
    assert build(model_of(*LINEAR), watch=Interrupting())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_watcher_that_fails_ends_the_build_with_its_own_error():
    class Failing(Watch):
        def share(self, detail, done):
            raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        build(model_of(*LINEAR), watch=Failing())


def test_engines_are_built_in_other_threads_as_well():
    """Other threads may not set handlers."""
    plans = []
    thread = threading.Thread(target=lambda: plans.append(build(model_of(*LINEAR))))
    thread.start()
    thread.join()
    assert len(plans) == 1
