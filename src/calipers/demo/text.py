"""The text that the demo calibrates and evaluates with: the standard library of this Python.

Which part a module belongs to follows from its name alone: whatever the version of Python, nobody
is evaluated on a module that the model which ships has learned from.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import Literal

from calipers.errors import DataError

Part = Literal["training", "calibration", "evaluation"]

_PIECE = 2048
# Tests, tables of data, generated files, and what some distributions leave out.
_LEFT_OUT = {
    *("__phello__", "dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3"),
    *("pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo"),
}


def part_of(module: str) -> Part:
    """Return the part to which a top-level module or package belongs.

    >>> [part_of(name) for name in ("argparse", "threading", "pdb")]
    ['training', 'calibration', 'evaluation']
    """
    lot = zlib.crc32(module.encode()) % 20
    return "evaluation" if lot < 2 else "calibration" if lot < 3 else "training"


def library_texts(part: Part) -> dict[str, str]:
    """Return the sources of one part of the standard library, by file name."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        is_left_out = _LEFT_OUT & set(name.parts) or name.parts[0].startswith("_sysconfigdata")
        if not is_left_out and part_of(name.parts[0].removesuffix(".py")) == part:
            texts[str(name)] = path.read_text(encoding="utf-8", errors="replace")
    if not any(texts.values()):
        raise DataError(
            "The demo calibrates and evaluates with the sources of Python's standard library, and "
            f"'{root}' has none of them",
            hint="Run it with a Python that was installed with its library as .py files.",
        )
    return texts


def library_pieces(part: Part) -> list[str]:
    """Return the sources in pieces, so that a few samples come from many modules."""
    return [
        text[start : start + _PIECE]
        for text in library_texts(part).values()
        for start in range(0, len(text), _PIECE)
    ]
