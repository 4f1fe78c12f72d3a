"""The program ``calipers``: how it begins, and how it ends when somebody wants it to.

Nothing is imported here that takes time, so that Ctrl-C is answered from the first moment on.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from calipers.cli import INTERRUPTED, WAITING


def main() -> None:
    """Run the program."""
    with _signals_answered():
        _let_waiting_threads_sleep()
        from calipers.cli.app import app

        _accept_any_encoding()
        app(prog_name="calipers")


def _let_waiting_threads_sleep() -> None:
    """Have the threads of torch sleep while they wait for each other, unless the user chose.

    By default they spin. Where others want the cores, too, that takes the time of the very thread
    that is waited for, and a small model takes twenty times as long. OpenMP reads this once, when
    torch is imported.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = "PASSIVE"


@contextmanager
def _signals_answered() -> Iterator[None]:
    """End as an exception would, so that nothing half-written stays behind."""
    try:
        sys.unraisablehook = _raise_later
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, _leave)
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; libraries are closing down
        if isinstance(end, KeyboardInterrupt) or end.code == INTERRUPTED:
            _say_interrupted()
            _exit(INTERRUPTED)
        raise


def _say_interrupted() -> None:
    text = "Interrupted. Nothing half-written is left."
    if "--json" in sys.argv:
        import json

        told = {"type": "KeyboardInterrupt", "message": text, "exit_code": INTERRUPTED}
        text = json.dumps({"error": told})
    print(text, file=sys.stderr)


def _exit(code: int) -> NoReturn:
    """Exit at once: where an interrupt met code in a string, Python would kill itself by it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _raise_later(lost: Any) -> None:
    """Send an interrupt again that came where nothing can be raised, as in the import machinery."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import _thread
    import threading

    threading.Timer(0.01, _thread.interrupt_main).start()


def _accept_any_encoding() -> None:
    """Let a terminal without a sign show another one, and not fail."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


if __name__ == "__main__":
    main()
