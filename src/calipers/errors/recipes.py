"""Recipes, and what they mean for a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from calipers.errors.base import CalipersError, ConfigurationError, Fields
from calipers.errors.text import Option, Words

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_CHOSEN_ON_TOP = ("weight_observer", "activation_observer")
"""Keys of a modifier that are options of functions and commands, too."""


class RecipeError(ConfigurationError):
    """A recipe that cannot be read, or that does not make sense.

    :param what: what is wrong, without the place
    :param path: the keys that lead to it, as far as they are known
    :param source: the file, or another word for where the recipe comes from
    :param line: the line in it
    """

    def __init__(
        self,
        what: Words,
        *,
        path: Iterable[str | int] = (),
        source: str | None = None,
        line: int | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        self.path = tuple(path)
        super().__init__(what, **fields)
        self.add_line(source, line)

    @classmethod
    def of(cls, error: CalipersError, where: Words = "", path: Iterable[str | int] = ()) -> Self:
        """Return what another error says, as one of a recipe.

        >>> str(RecipeError.of(CalipersError("must be a number", got="'x'"), "seed"))
        "seed: must be a number, got 'x'."
        """
        made = cls(**vars(error.context), path=path)
        made.add_place(where)
        return made

    def add_line(self, source: str | None, line: int | None) -> None:
        """Say where in a file it is, as far as that is known."""
        place = [*([source] if source else []), *([f"line {line}"] if line else [])]
        self.add_place(", ".join(place))


class CodeNotAllowedError(RecipeError):
    """An observer in a file of Python code, which nobody has allowed to run."""


def code_not_allowed(
    name: str,
    key: str = "",
    *,
    path: Iterable[str | int] = (),
    source: str | None = None,
    line: int | None = None,
) -> CodeNotAllowedError:
    """Refuse to run a file.

    :param name: the file and its class, ``path/to/file.py:Class``
    :param key: the key of the recipe that names it
    """
    return CodeNotAllowedError(
        f"'{name}' is Python code, which was not run: it could do anything that you can",
        where=_named(key, source),
        hint=f"If you trust the file '{name.rpartition(':')[0]}', pass "
        + Option("allow_code", True),
        path=path,
        source=source,
        line=line,
    )


def unfit(module: str, base_name: str, problem: Words, hint: Words = "") -> RecipeError:
    """Refuse a tensor that cannot be quantized as the recipe says."""
    return RecipeError(problem, where=tensor_of(module, base_name), hint=hint)


def tensor_of(module: str, base_name: str) -> str:
    """Return how messages call a tensor of a module."""
    return f"Module '{module}', {base_name}"


def _named(key: str, source: str | None) -> Words:
    """Return a key of a modifier; what stands in no file may have been given as an option."""
    owner, _, name = key.rpartition(".")
    return Option(name, owner=owner) if source is None and name in _CHOSEN_ON_TOP else key
