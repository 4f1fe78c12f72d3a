"""What a module may become: a scheme, and what finds its scales."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from calipers.errors import ConfigurationError, Option
from calipers.modifiers import QuantizationModifier
from calipers.modifiers.choices import preset_name, read_choice
from calipers.recipes import Recipe, load_changed_recipe

UNQUANTIZED = "UNQUANTIZED"
SCHEMES = ("W4A16", "W8A16", UNQUANTIZED)
"""What modules may become if nobody says otherwise."""
SOLVER: Mapping[str, Any] = {"name": "optimal", "importance": "imatrix"}
"""What finds the scales of weights if nobody says otherwise."""
_ACTIVATIONS = "histogram_mse"


@dataclass(frozen=True)
class Candidate:
    """A scheme and an observer of weights; without a recipe a module stays as it is.

    :param name: the scheme, and the solver where there are several
    :param scheme: a preset; ``-g32`` behind it are groups of 32
    """

    name: str
    scheme: str
    solver: str = ""
    recipe: Recipe | None = None

    @property
    def quantization(self) -> QuantizationScheme:
        """The scheme with its observers."""
        assert self.recipe is not None
        (modifier,) = self.recipe.modifiers
        assert isinstance(modifier, QuantizationModifier)
        (scheme,) = modifier.schemes.values()
        return scheme


def read_candidates(
    schemes: str | Iterable[str], solvers: Iterable[Any], ignore: Sequence[str]
) -> tuple[Candidate, ...]:
    """Return every scheme with every solver; refuse what there is not.

    >>> found = read_candidates("W4A16-g32, UNQUANTIZED", ["optimal", "memoryless_mse"], [])
    >>> [each.name for each in found]
    ['W4A16-g32 optimal', 'W4A16-g32 memoryless_mse', 'UNQUANTIZED']
    """
    words = schemes.split(",") if isinstance(schemes, str) else schemes
    names = list(dict.fromkeys(_name(str(word)) for word in words))
    if not [name for name in names if name != UNQUANTIZED]:
        raise ConfigurationError(
            "There is no scheme to choose", hint="Pass " + Option("schemes", "W4A16,W8A16")
        )
    chosen = [read_choice(each) for each in solvers]
    if not chosen:
        problem = "There is nothing that finds scales"
        raise ConfigurationError(problem, hint="Pass " + Option("solvers", "optimal"))
    found: list[Candidate] = []
    for name in names:
        if name == UNQUANTIZED:
            found.append(Candidate(name, name))
            continue
        for choice in chosen:
            options = "".join(f",{key}={value}" for key, value in choice.options.items())
            recipe = _recipe(name, choice.to_data(), ignore)
            solver = choice.name + options
            label = f"{name} {solver}" if len(chosen) > 1 else name
            found.append(Candidate(label, name, solver, recipe))
    return tuple(found)


def _name(word: str) -> str:
    scheme, group = _parts(word.strip())
    return preset_name(scheme) + ("" if group is None else f"-g{group}")


def _parts(word: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(.+)-g(\d+)", word)
    return (word, None) if found is None else (found[1], int(found[2]))


def _recipe(name: str, solver: Any, ignore: Sequence[str]) -> Recipe:
    scheme, group = _parts(name)
    modifier = QuantizationModifier(scheme=scheme, ignore=tuple(ignore), unmatched="ignore")
    (given,) = modifier.schemes.values()
    activations = given.input_activations
    is_static = activations is not None and activations.dynamic is False
    return load_changed_recipe(
        modifier,
        group_size=group,
        weight_observer=solver,
        activation_observer=_ACTIVATIONS if is_static else None,
    )
