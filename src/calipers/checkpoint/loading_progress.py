"""While transformers loads a model, its progress is shown as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from calipers.runtime.progress import Begin


@contextmanager
def loading_counted(begin: Begin) -> Iterator[None]:
    """Count the tensors that are loaded, in place of the bars that transformers would show.

    :param begin: is told how many there are
    """
    from transformers.utils import logging

    class Counted(logging.EmptyTqdm):
        """What transformers takes for a bar."""

        def __iter__(self) -> Iterator[Any]:
            yield from _counted(self._iterator or (), begin)

    def made(_: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return Counted(*arguments, **options)  # type: ignore[no-untyped-call]

    before = logging.set_tqdm_hook(made)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _counted(loaded: Iterable[Any], begin: Begin) -> Iterator[Any]:
    if not isinstance(loaded, Sized):
        yield from loaded
        return
    add = begin(len(loaded), "tensors")
    for each in loaded:
        yield each
        add(1)
