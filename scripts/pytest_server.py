"""Run pytest again and again, each time in a process that has the heavy libraries already.

Every line of standard input is a list of arguments, as JSON, with the seconds they may take in
front; the answer is a line with the exit code, or null where it took too long. Calipers itself is
imported by the children, each of which may find another source.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

HEAVY = (
    "torch.distributed",
    "torch._dynamo",
    "compressed_tensors.quantization",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "numpy",
    "pytest",
    "typer.testing",
    "rich.console",
)


def serve() -> None:
    """Answer until there are no more lines."""
    sys.path.pop(0)  # the folder of this file
    for name in HEAVY:
        import_module(name)
    for line in sys.stdin:
        seconds, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(arguments)
        print(json.dumps(_code_of(child, seconds)), flush=True)


def _run(arguments: list[str]) -> NoReturn:
    import pytest

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # standard output is for answers
    # Plugins of libraries that are imported already are none of ours.
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*ignored, *arguments]))
    sys.stdout.flush()
    os._exit(code)


def _code_of(child: int, seconds: float) -> int | None:
    """Wait for a child, and end it with all it has started when its time is over."""
    end = time.monotonic() + seconds
    found, status = os.waitpid(child, os.WNOHANG)
    while not found and time.monotonic() < end:
        time.sleep(0.02)
        found, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not found:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    serve()
