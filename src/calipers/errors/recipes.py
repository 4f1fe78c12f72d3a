"""Recipes, and what they mean for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from calipers.errors.base import ConfigurationError, Fields
from calipers.errors.formatting import counted, listing, shortened, sizes_that_divide
from calipers.errors.observing import DivisibilityError, LayoutError
from calipers.errors.text import Option, Text, Words, joined

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
        place = [*([source] if source else []), *([f"line {line}"] if line else [])]
        self.add_place(", ".join(place))

    @property
    def problem(self) -> Text:
        """The message without the place."""
        return replace(self.context, where="").text


class CodeNotAllowedError(RecipeError):
    """An observer in a file of Python code, which nobody has allowed to run.

    :param name: the file and its class, ``path/to/file.py:Class``
    :param key: the key of the recipe that names it
    """

    def __init__(
        self,
        name: str,
        key: str | None = None,
        *,
        path: Iterable[str | int] = (),
        source: str | None = None,
        line: int | None = None,
    ) -> None:
        file = name.rpartition(":")[0]
        told = f"'{name}' is Python code, which was not run: it could do anything that you can"
        super().__init__(
            joined(": ", [_named(key or "", source), told]),
            hint=f"If you trust the file '{file}', pass " + Option("allow_code", True),
            path=path,
            source=source,
            line=line,
        )


def _named(key: str, source: str | None) -> Words:
    """Return a key of a modifier; what stands in no file may have been given as an option."""
    owner, _, name = key.rpartition(".")
    return Option(name, owner=owner) if source is None and name in _CHOSEN_ON_TOP else key


class UnmatchedPatternError(RecipeError):
    """A pattern that matches nothing in the model it is meant for."""


class ClaimError(RecipeError):
    """Two modifiers that both want to quantize one tensor."""

    def __init__(self, tensor: str, first: str, second: str) -> None:
        super().__init__(
            f"Both {first} and {second} quantize '{tensor}'",
            hint="A tensor is quantized once: narrow the targets of one of them, or add the module "
            "to its ignore list",
        )


class AlreadyQuantizedError(RecipeError):
    """A recipe for modules that are quantized already."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(
            f"{'is' if len(modules) == 1 else 'are'} already quantized (has a quantization_scheme)",
            subject=shortened(f"'{name}'" for name in modules),
            hint="Start from the unquantized model, or ignore these modules",
        )


class UnfitError(RecipeError):
    """A tensor that cannot be quantized as the recipe says."""

    def __init__(self, module: str, base_name: str, problem: object) -> None:
        super().__init__(f"Module '{module}', {base_name}: {problem}")


class GroupSizeError(RecipeError):
    """A group size for a recipe in which no weight can have it."""

    def __init__(self, size: int, weights: Sequence[str]) -> None:
        found = f"its weights are {listing(weights)}" if weights else "it quantizes no weights"
        super().__init__(
            f"has no meaning here: {found}",
            subject=Option("group_size", size),
            hint="Groups whose size can be chosen are those of strategy 'group', as in W4A16; "
            "those of NVFP4 and MX are fixed by the format. Leave it out, or choose another scheme",
        )


class ModulesDivisibilityError(DivisibilityError):
    """Modules whose sizes the groups or blocks of the recipe do not divide."""

    SHOWN: ClassVar[int] = 5

    def __init__(
        self, offenders: Sequence[tuple[str, str, int, int]], group_sizes: Sequence[int] = ()
    ) -> None:
        """Name the offenders: module, tensor, size, group size; and sizes that fit all weights."""
        lines = [
            f"  {module}, {base_name}: {size} is not divisible by {group_size}. "
            f"{sizes_that_divide(size)}."
            for module, base_name, size, group_size in offenders[: self.SHOWN]
        ]
        if len(offenders) > self.SHOWN:
            lines.append(f"  and {len(offenders) - self.SHOWN} more")
        head = "The group or block size of the recipe does not divide"
        tensors = counted(len(offenders), "tensor")
        told = "\n".join([f"{head} {tensors}:", *lines, ""])
        LayoutError.__init__(self, told + _way_out(group_sizes))


def _way_out(group_sizes: Sequence[int]) -> Text:
    if not group_sizes:
        return Text("Choose another scheme, or ignore these modules.")
    sizes = joined(", ", (Option("group_size", size) for size in sorted(group_sizes, reverse=True)))
    return "Sizes that fit every weight: " + sizes + ". Choose one, or ignore these modules."
