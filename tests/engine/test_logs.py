"""The process's logger, and the logs of its users."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from types import SimpleNamespace

import pytest
from rtx_builds import trt
from support import at_once

from trtconvert.engine.logs import make_log


@pytest.fixture
def library():
    """A library without logs of other tests."""

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"

    return SimpleNamespace(ILogger=ILogger)


def test_all_have_one_logger_which_outlives_them():
    first = make_log(trt)
    logger, gone = first.logger, weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None and make_log(trt).logger is logger


def test_a_user_may_go_before_one_that_came_later():
    """The library keeps the first logger, and the plugin registry calls it later."""
    code = """
        import gc
        import tensorrt_rtx_bindings as trt
        from trtconvert.engine.logs import make_log

        first, second = make_log(trt), make_log(trt)
        builders = [trt.Builder(log.logger) for log in (first, second)]
        del first, builders[0]
        gc.collect()
        assert trt.get_plugin_registry().get_creator("Nonsense", "1", "") is None
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_loggers_of_libraries_are_their_own(library):
    assert make_log(library).logger is not make_log(trt).logger
    assert isinstance(make_log(trt).logger, trt.ILogger)


def test_a_call_is_heard_by_its_log_alone(library):
    outer, inner, other = (make_log(library) for _ in range(3))
    with outer:
        with inner:
            inner.logger.log("ERROR", "of the inner")
        outer.logger.log("INTERNAL_ERROR", "of the outer")
    assert (outer.last(), inner.last(), other.last()) == ("of the outer", "of the inner", "no reason was logged")


def test_log_messages_of_other_threads_reach_all(library):
    """The builder logs from its own threads."""
    logs = [make_log(library) for _ in range(2)]
    with logs[0]:
        thread = threading.Thread(target=logs[0].logger.log, args=("ERROR", "of a thread"))
        thread.start()
        thread.join()
    assert [log.last() for log in logs] == ["of a thread"] * 2


def test_an_error_inside_ends_the_hearing(library):
    log, other = make_log(library), make_log(library)
    with pytest.raises(ValueError, match="inside"), log:
        raise ValueError("inside")
    log.logger.log("ERROR", "later")
    assert log.last() == other.last() == "later"


def test_a_log_keeps_the_latest_errors_and_no_other_messages(library):
    log = make_log(library)
    for number in range(1000):
        log.logger.log("ERROR", f"error {number}")
        log.logger.log("INFO", "no error")
    assert len(log.errors) == 100 and log.last() == "error 998; error 999"
    assert log.text().startswith("error 900\n")


def test_logs_come_and_go_while_others_are_written_to(library):
    kept, heard = make_log(library), []

    def work(number):
        for _ in range(300):
            log = make_log(library)
            log.logger.log("ERROR", f"of {number}")
            heard.append(bool(log.errors))

    at_once(work, range(4))
    assert len(heard) == 1200 and all(heard) and len(kept.errors) == 100
