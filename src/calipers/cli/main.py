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
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how the threads of OpenMP wait for each other; the first is the standard."""


def main() -> None:
    """Run the program."""
    with _signals_answered():
        _let_waiting_threads_sleep()
        from calipers.cli.app import app

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal without a sign shows another one
                stream.reconfigure(errors="replace")
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
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; libraries are closing down
        if isinstance(end, KeyboardInterrupt) or end.code == INTERRUPTED:
            _end_interrupted()
        raise


def _end_interrupted() -> NoReturn:
    """Say so, and exit at once: where Ctrl-C met code in a string, Python would kill itself."""
    text = "Interrupted. Nothing half-written is left."
    if "--json" in sys.argv:
        import json

        error = {"type": "KeyboardInterrupt", "message": text, "exit_code": INTERRUPTED}
        text = json.dumps({"error": error})
    print(text, file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)


def _raise_later(unraisable: Any) -> None:
    """Send an interrupt again that came where nothing can be raised, as in the import machinery."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import _thread
    import threading

    threading.Timer(0.01, _thread.interrupt_main).start()


if __name__ == "__main__":
    main()
