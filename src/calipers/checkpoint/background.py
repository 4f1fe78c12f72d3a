"""Work that goes on while its results are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from typing import TypeVar

import torch

T = TypeVar("T")


def in_background(items: Generator[T, None, None], ahead: int = 1) -> Generator[T, None, None]:
    """Give what a generator gives, which works in a thread of its own.

    It has at most ``ahead`` items ready that nobody has asked for. What it raises is raised here.
    Whoever stops asking must close what is returned, which waits for the item that is at work.

    >>> list(in_background(number for number in range(3)))
    [0, 1, 2]
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(ahead)
    over = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                break

    def work() -> None:
        torch.set_num_threads(threads)
        try:
            with closing(items):
                for item in items:
                    put((item,))
                    del item  # it may be large, and the next one is about to be made
                    if over.is_set():
                        return
            put(None)
        except BaseException as error:
            put(error)

    threads = torch.get_num_threads()
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]
            del found
    finally:
        over.set()
        worker.join()
