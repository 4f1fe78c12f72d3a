"""JSON, read without surprises."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from calipers.errors import CalipersError, damaged_file
from calipers.files.regular_files import read_whole

Damaged = Callable[[object, str], CalipersError]
"""Makes the error that says what is wrong with a file."""


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; every key stands once, every text is text."""
    try:
        content = read_whole(file)
    except OSError as error:
        raise damaged_file(file, f"it cannot be read ({error.strerror})") from error
    return parse_json_object(content, file)


def parse_json_object(
    content: bytes, file: object, damaged: Damaged = damaged_file
) -> dict[str, Any]:
    """Return the object that some bytes are; ``file`` is what errors name."""
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_without_doubles)
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # half a character cannot be written
    except UnicodeDecodeError as error:
        raise damaged(file, f"no UTF-8 text at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise damaged(file, "a text in it has half a character (a surrogate)") from error
    except RecursionError as error:
        raise damaged(file, "it is nested too deeply") from error
    except ValueError as error:
        raise damaged(file, f"no valid JSON: {error}") from error
    if not isinstance(found, dict):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise damaged(file, f"it holds {kind}, not a JSON object")
    return found


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found
