"""Recipes: stages of modifiers, from YAML, JSON, plain data or objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

import torch
import yaml

from calipers.errors import (
    CalipersError,
    ConfigurationError,
    Option,
    RecipeError,
    check_whole_number,
    code_not_allowed,
    listing,
    nearest,
    no_effect,
    not_allowed,
)
from calipers.files.reading import read_whole
from calipers.notebook import NotebookView
from calipers.observers.registry import is_file_of_code
from calipers.options import IGNORED_BY_DEFAULT
from calipers.planning.plan import Plan
from calipers.recipes.compiling import compile_plan
from calipers.recipes.reading import Document, Path, read_document, refuse_surrogates
from calipers.steps import Modifier, QuantizationModifier
from calipers.steps.base import STEPS, steps_by_method
from calipers.steps.choices import check_observer, named_observers, preset_name, read_choice
from calipers.topology.names import EXPERT_PROJECTIONS

_FOREIGN = (
    "AutoRoundModifier",
    "SparseGPTModifier",
    "WandaPruningModifier",
)
_SUFFIXES = (".yaml", ".yml", ".json")
_DEFAULT = "default"
_LARGEST = 16 * 2**20
"""The largest file of a recipe, in bytes: a hundred thousand names of modules have room in it."""


@dataclass(frozen=True)
class Stage:
    """Modifiers that work together, under a name."""

    name: str
    modifiers: tuple[Modifier, ...]


@dataclass(frozen=True)
class Recipe(NotebookView):
    """What to do with a model, in order.

    >>> recipe = load_recipe("modifiers: {QuantizationModifier: {scheme: W8A8}}")
    >>> print(recipe.to_yaml(), end="")
    default_stage:
      default_modifiers:
        QuantizationModifier:
          targets:
          - Linear
          scheme: W8A8
    """

    stages: tuple[Stage, ...]

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """All modifiers, in order."""
        return tuple(modifier for stage in self.stages for modifier in stage.modifiers)

    @property
    def steps(self) -> dict[str, Modifier]:
        """All modifiers, in order, each under what messages call it."""
        return {
            f"{modifier.label()} (number {number} of stage '{stage.name}')": modifier
            for stage in self.stages
            for number, modifier in enumerate(stage.modifiers, 1)
        }

    def compile(self, model: torch.nn.Module) -> Plan:
        """Say what this recipe means for a model; the model is only looked at."""
        return compile_plan(self.steps, model)

    def changed(
        self,
        *,
        method: str | None = None,
        group_size: int | None = None,
        weight_observer: Any = None,
        activation_observer: Any = None,
    ) -> Recipe:
        """Return the recipe with another method, other groups of weights, or other observers.

        :param method: how weights are rounded: ``rtn``, each to nearest, or ``gptq``

        >>> recipe = load_recipe("W4A16").changed(group_size=32, weight_observer="mse")
        >>> recipe.modifiers[0].schemes["group_0"].weights.group_size
        32
        """
        modifiers = self.modifiers
        if method is not None:  # first: observers that nobody has chosen depend on it
            modifiers = _round_by(modifiers, method)
        if group_size is not None:
            modifiers = _regroup(modifiers, group_size)
        if weight_observer is not None:
            modifiers = _observe(modifiers, "weight_observer", weight_observer)
        if activation_observer is not None:
            modifiers = _observe(modifiers, "activation_observer", activation_observer)
        if modifiers == self.modifiers:
            return self
        rest = iter(modifiers)
        return Recipe(
            tuple(replace(s, modifiers=tuple(islice(rest, len(s.modifiers)))) for s in self.stages)
        )

    def on_float_inputs(self) -> Recipe:
        """Return the recipe with layers calibrated on what the model computes as it is.

        Modifiers that were told what to calibrate on are left as they are.
        """
        stages = (
            replace(stage, modifiers=tuple(each.on_float_inputs() for each in stage.modifiers))
            for stage in self.stages
        )
        return Recipe(tuple(stages))

    def targets_experts(self, experts: str) -> bool:
        """Whether a modifier means Linear layers that these experts would have, if unfused."""
        layer = torch.nn.Linear(1, 1, device="meta")
        names = [f"{experts}.0.{part}" for part in EXPERT_PROJECTIONS]
        return any(
            modifier.targets_module(name, layer) for modifier in self.modifiers for name in names
        )

    def __repr__(self) -> str:
        parts = [
            f"{stage.name}: {', '.join(modifier.label() for modifier in stage.modifiers)}"
            for stage in self.stages
        ]
        return f"Recipe({'; '.join(parts)})"

    def to_yaml(self) -> str:
        """Write the recipe so that :func:`load_recipe` reads it back."""
        data = {}
        for stage in self.stages:
            pairs = [(type(modifier).__name__, modifier.to_data()) for modifier in stage.modifiers]
            modifiers: Any = dict(pairs)
            if len(modifiers) < len(pairs):  # a list, where one kind occurs twice
                modifiers = [{name: fields} for name, fields in pairs]
            data[f"{stage.name}_stage"] = {f"{stage.name}_modifiers": modifiers}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


Modifiers = tuple[Modifier, ...]


def _round_by(modifiers: Modifiers, method: str) -> Modifiers:
    """Let whoever quantizes weights round them by a method; if there is nobody, refuse."""
    steps = steps_by_method()
    if method not in steps:
        raise not_allowed("method", method, steps)
    changed = [modifier.converted_to(steps[method]) for modifier in modifiers]
    if not any(changed):
        raise RecipeError(
            "has no meaning here: the recipe quantizes no weights",
            subject=Option("method", method),
            hint="Leave it out, or choose a scheme with weights, such as W4A16",
        )
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def _regroup(modifiers: Modifiers, size: int) -> Modifiers:
    """Give every weight whose groups are free groups of this size; if there is none, refuse."""
    check_whole_number("group_size", size, least=1)
    changed = [modifier.regrouped(size) for modifier in modifiers]
    if not any(changed):
        formats = dict.fromkeys(way for each in modifiers for way in each.weight_formats())
        problem = f"its weights are {listing(formats)}" if formats else "it quantizes no weights"
        raise RecipeError(
            f"has no meaning here: {problem}",
            subject=Option("group_size", size),
            hint="Groups whose size can be chosen are those of strategy 'group', as in W4A16; "
            "those of NVFP4 and MX are fixed by the format. Leave it out, or choose another scheme",
        )
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def _observe(modifiers: Modifiers, key: str, given: Any) -> Modifiers:
    """Let another observer watch: ``key`` is weight_observer or activation_observer."""
    try:
        choice = read_choice(given)
    except ConfigurationError as error:
        raise RecipeError.of(error, Option(key)) from None
    changed = [modifier.with_observer(key, choice) for modifier in modifiers]
    if not any(changed):
        warnings.warn(no_effect(Option(key, choice.name)), stacklevel=4)
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def load_changed_recipe(recipe: Any, *, allow_code: bool = False, **changes: Any) -> Recipe:
    """Read a recipe, and put changes on top of it.

    :param changes: the keywords of :meth:`Recipe.changed`
    """
    changed = _read(recipe, allow_code).changed(**changes)
    for modifier in changed.modifiers:
        _settle_code(modifier, Document(None, allow_code=allow_code), ())
    return changed


def load_recipe(source: Any, *, allow_code: bool = False) -> Recipe:
    """Make a recipe.

    :param source: a recipe, a modifier, a list of such, plain data, the path of a YAML or JSON
        file, its text, or the name of a preset such as ``W4A16`` (all Linear modules but lm_head)
    :param allow_code: whether observers in files, ``path/to/file.py:Class``, may run; without it
        a recipe that names one is refused
    """
    return load_changed_recipe(source, allow_code=allow_code)


def _read(source: Any, allow_code: bool) -> Recipe:
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Modifier):
        return Recipe((Stage(_DEFAULT, (source,)),))
    if isinstance(source, Mapping):
        return _from_document(Document(dict(source), allow_code=allow_code))
    if isinstance(source, list | tuple):
        return _joined(source, allow_code)
    is_path = isinstance(source, os.PathLike)
    if isinstance(source, str) and "\n" not in source:
        is_there = os.path.exists(source) and not os.path.isdir(source)
        is_path = is_there or source.lower().endswith(_SUFFIXES)
    if is_path:
        path = FilePath(source)
        try:
            text = read_whole(path, _LARGEST).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8 text"
            raise RecipeError(f"The recipe '{path}' cannot be read: {reason}") from None
        return _from_document(replace(read_document(text, str(path)), allow_code=allow_code))
    if isinstance(source, str):
        document = read_document(source, "recipe")
        if isinstance(document.data, str):
            return _from_preset(document.data)
        return _from_document(replace(document, allow_code=allow_code))
    raise RecipeError(
        "A recipe is a path, YAML, a mapping, a modifier or a list of modifiers", got=repr(source)
    )


def _settle_code(modifier: Modifier, document: Document, path: Path) -> None:
    """Load the files of code that a modifier names, where that is allowed, and check options."""
    for inner, choice in named_observers(modifier):
        if not is_file_of_code(choice.name):
            continue
        at, key = (*path, *inner), ".".join(map(str, (modifier.label(), *inner)))
        if not document.allow_code:
            raise code_not_allowed(
                choice.name, key, path=at, source=document.source, line=document.line_of(at)
            )
        try:
            check_observer(choice.name, choice.options, str(inner[-1]), allow_code=True)
        except CalipersError as error:
            raise document.located(RecipeError.of(error, key), at) from error


def _joined(sources: Iterable[Any], allow_code: bool) -> Recipe:
    """Put recipes one after the other; modifiers that stand side by side share a stage."""
    stages: list[Stage] = []
    side_by_side = False
    for each in _flat(sources):
        alone = isinstance(each, Modifier)
        if alone and side_by_side:
            stages[-1] = replace(stages[-1], modifiers=(*stages[-1].modifiers, each))
        else:
            stages.extend(_read(each, allow_code).stages)
        side_by_side = alone
    return _checked(stages, Document(None))


def _flat(sources: Iterable[Any]) -> Iterator[Any]:
    for each in sources:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _from_preset(name: str) -> Recipe:
    try:
        scheme = preset_name(name)
    except RecipeError as error:
        error.add_place(
            f"'{name}' is neither a file, nor YAML with stages or modifiers, nor the name of a "
            "preset"
        )
        raise
    modifier = QuantizationModifier(scheme=scheme, ignore=IGNORED_BY_DEFAULT, unmatched="ignore")
    return Recipe((Stage(_DEFAULT, (modifier,)),))


def _from_document(document: Document) -> Recipe:
    refuse_surrogates(document, document.data)
    stages: list[Stage] = []
    for key, body in _mapping(document, document.data, (), "A recipe").items():
        if key.endswith("_stage") and key != "_stage":
            modifiers: list[Modifier] = []
            for group, inner in _mapping(document, body, (key,), f"'{key}'").items():
                if not _is_group(group):
                    unknown = _unknown_key(group, f"'{key}'", "<name>_modifiers")
                    raise document.located(unknown, (key, group))
                modifiers.extend(_modifiers(document, inner, (key, group)))
            stages.append(Stage(key.removesuffix("_stage"), tuple(modifiers)))
        elif _is_group(key):
            stages.append(Stage(_DEFAULT, tuple(_modifiers(document, body, (key,)))))
        else:
            unknown = _unknown_key(key, "the recipe", "<name>_stage")
            raise document.located(unknown, (key,))
    return _checked(stages, document)


def _is_group(key: str) -> bool:
    return key == "modifiers" or (key.endswith("_modifiers") and key != "_modifiers")


def _unknown_key(key: str, owner: str, shape: str) -> RecipeError:
    if key in STEPS:
        hint = "Put it under 'modifiers:'."
        return RecipeError(f"'{key}' stands directly in {owner}", hint=hint)
    examples = sorted(shape.replace("<name>", name) for name in ("quantization", _DEFAULT))
    return RecipeError(
        f"unknown key '{key}' in {owner}",
        meant=nearest(key, ["modifiers", *examples]),
        allowed=[shape, "modifiers"],
    )


def _modifiers(document: Document, body: Any, path: Path) -> Iterator[Modifier]:
    """Go through the modifiers of a group: a mapping, or a list of mappings with one key each."""
    if isinstance(body, Modifier):
        yield body
    elif isinstance(body, list | tuple):
        for index, each in enumerate(body):
            yield from _modifiers(document, each, (*path, index))
    else:
        for name, fields in _mapping(document, body, path, f"'{path[-1]}'").items():
            at = (*path, name)
            if name in _FOREIGN and name not in STEPS:
                absent = RecipeError(f"Calipers does not have '{name}'", allowed=STEPS.names())
                raise document.located(absent, at)
            try:
                kind = STEPS.get(name)
            except ConfigurationError as error:
                raise document.located(RecipeError.of(error), at) from None
            if isinstance(fields, kind):
                yield fields
                continue
            given = {} if fields is None else _mapping(document, fields, at, f"'{name}'")
            try:
                read = kind.read(given)
            except RecipeError as error:
                raise document.located(error, at) from None
            for modifier in read:
                _settle_code(modifier, document, at)
                yield modifier


def _mapping(document: Document, data: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else repr(data)[:80]
        raise document.error(f"{what} must be a mapping", path, got=got)
    return {str(key): value for key, value in data.items()}


def _checked(stages: list[Stage], document: Document) -> Recipe:
    """Give every stage a name of its own; a recipe without modifiers is refused."""
    if not any(stage.modifiers for stage in stages):
        raise document.error("The recipe has no modifiers", allowed=STEPS.names())
    named: dict[str, Stage] = {}
    for stage in stages:
        name, number = stage.name, 1
        while name in named:
            number += 1
            name = f"{stage.name}_{number}"
        named[name] = replace(stage, name=name)
    return Recipe(tuple(named.values()))
