"""SIGTERM within a job of many processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from calipers.runtime.distributed import (
    Terminated,
    TerminationHandler,
    gone_among,
    my_address,
)


def test_the_signal_is_raised_and_raised_again_and_then_let_go() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handler = TerminationHandler()
    handler.install()
    handler.check()
    try:
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # once is enough
        with pytest.raises(Terminated):
            handler.check()
    finally:
        handler.remove()
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_ignores_it_goes_on_to_do_so() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        handler = TerminationHandler()
        handler.install()
        os.kill(os.getpid(), signal.SIGTERM)
        handler.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_change_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=TerminationHandler().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_is_gone_is_found_before_its_parent_knows() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = socket.gethostname()
        known = [my_address(), (here, child.pid), ("elsewhere", child.pid)]
        assert gone_among(known) == {}
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert gone_among(known) == {1: f"process {child.pid} on {here}"}
        child.wait()
        assert gone_among(known) == {1: f"process {child.pid} on {here}"}
