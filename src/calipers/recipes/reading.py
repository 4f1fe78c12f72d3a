"""YAML and JSON as plain data, with the line of every key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from calipers.errors import Fields, RecipeError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Path = tuple[str | int, ...]

_MOST_ENTRIES = 100_000
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_ENUM_TAG = "tag:yaml.org,2002:python/object/apply:compressed_tensors.quantization."


@dataclass(frozen=True)
class Document:
    """Plain data, and where it was read from.

    :param source: how messages call the file or text; None for data that was not read
    :param lines: the line of each key and item, by the path that leads to it
    :param allow_code: whether files of code that it names may run
    """

    data: Any
    source: str | None = None
    lines: Mapping[Path, int] = field(default_factory=dict)
    allow_code: bool = False

    def line_of(self, path: Path) -> int | None:
        """Return the line of a key, or of the nearest one around it."""
        if path in self.lines:
            return self.lines[path]
        if path:
            inside = (at for at in self.lines if at[: len(path) - 1] == path[:-1])
            found = [self.lines[at] for at in inside if len(at) > len(path) and at[-1] == path[-1]]
            return found[0] if found else self.line_of(path[:-1])
        return None

    def error(self, what: str, path: Path = (), **fields: Unpack[Fields]) -> RecipeError:
        """Make the error that says where a problem is."""
        return self.located(RecipeError(what, path=path, **fields))

    def located(self, error: RecipeError, path: Path = ()) -> RecipeError:
        """Say where in the document an error is that knows the keys that come after a path."""
        error.path = (*path, *error.path)
        error.add_line(self.source, self.line_of(error.path))
        return error


def read_document(text: str, source: str) -> Document:
    """Read YAML or JSON. Only plain data is built; a key that stands twice is an error.

    >>> read_document("a:\\n  b: 1", "recipe").lines
    {('a',): 1, ('a', 'b'): 2}
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        walk = _Walk(loader, source)
        return Document(None if node is None else walk.build(node, ()), source, walk.lines)
    except RecursionError:
        raise RecipeError("is nested too deeply", source=source) from None
    except yaml.YAMLError as error:
        with suppress(ValueError):  # what YAML refuses and JSON allows, such as tabs
            return Document(json.loads(text), source)
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = None if mark is None else mark.line + 1
        raise RecipeError(f"this is no YAML: {problem}", source=source, line=line) from None


def refuse_surrogates(document: Document, value: Any, path: Path = ()) -> None:
    """Refuse a text with half a character, which escapes can spell and no file can hold.

    :param value: what the document holds under a path
    """
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{value!a} has half a character (a surrogate) at position {error.start}"
            raise document.error(what, path, hint="Correct the escape, or remove it.") from None
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_surrogates(document, key, path)
            refuse_surrogates(document, inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            refuse_surrogates(document, inner, (*path, index))


class _Walk:
    """Builds data from the nodes of YAML and notes their lines on the way."""

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self.lines: dict[Path, int] = {}
        self._loader = loader
        self._source = source
        self._open: set[int] = set()
        self._flat: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        """Return the data of a node."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _PLAIN_TAGS:
            return self._word(node)
        if id(node) in self._open:
            raise self._error("an anchor contains itself", node)
        if len(self.lines) > _MOST_ENTRIES:
            raise self._error(f"more than {_MOST_ENTRIES} entries", node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self._at(item, item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            if id(node) not in self._flat:
                self._flat.add(id(node))
                self._refuse_doubles(node)
                self._loader.flatten_mapping(node)
            # What "<<" merges in comes first, so that a key of the mapping itself wins.
            return {self._key(k): self._at(v, k, (*path, self._key(k))) for k, v in node.value}
        finally:
            self._open.remove(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._loader.construct_object(node)
        except ValueError as error:
            raise self._error(f"'{node.value}' cannot be read: {error}", node) from None

    def _word(self, node: yaml.Node) -> Any:
        """Return the word of an enum as llm-compressor writes it; refuse all other tags."""
        value = node.value
        is_word = isinstance(value, list) and len(value) == 1
        if node.tag.startswith(_ENUM_TAG) and is_word and isinstance(value[0], yaml.ScalarNode):
            return self._scalar(value[0])
        name = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise self._error(f"the tag '{name}' is refused: a recipe holds plain data only", node)

    def _at(self, node: yaml.Node, place: yaml.Node, path: Path) -> Any:
        self.lines[path] = place.start_mark.line + 1
        return self.build(node, path)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error("a key must be a word, not a list or a mapping", node)
        return str(self._scalar(node))

    def _refuse_doubles(self, node: yaml.MappingNode) -> None:
        seen: dict[str, int] = {}
        for place, _ in node.value:
            if place.tag == "tag:yaml.org,2002:merge":
                continue
            key = self._key(place)
            if key in seen:
                raise self._error(
                    f"the key '{key}' stands twice, first in line {seen[key]}",
                    place,
                    hint="Keep one; several modifiers of one kind are given as a list",
                )
            seen[key] = place.start_mark.line + 1

    def _error(self, what: str, node: yaml.Node, hint: str = "") -> RecipeError:
        return RecipeError(what, hint=hint, source=self._source, line=node.start_mark.line + 1)
