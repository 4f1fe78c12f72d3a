"""Recipes: stages of modifiers, from YAML, JSON, plain data or objects."""

from __future__ import annotations

import os
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
    RecipeError,
    code_not_allowed,
    nearest,
)
from calipers.files.reading import read_whole
from calipers.notebook import NotebookView
from calipers.observers.registry import is_file_of_code
from calipers.options import IGNORED_BY_DEFAULT
from calipers.planning.plan import Plan
from calipers.recipes.changing import observe, regroup, round_by
from calipers.recipes.compiling import compile_plan
from calipers.recipes.reading import Document, Path, read_document, refuse_surrogates
from calipers.steps import Modifier, QuantizationModifier
from calipers.steps.base import STEPS
from calipers.steps.choices import check_observer, named_observers, preset_name
from calipers.topology.names import EXPERT_PROJECTIONS

_FOREIGN = (
    "AWQModifier",
    "AutoRoundModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "QuIPModifier",
    "SpinQuantModifier",
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
            modifiers = round_by(modifiers, method)
        if group_size is not None:
            modifiers = regroup(modifiers, group_size)
        if weight_observer is not None:
            modifiers = observe(modifiers, "weight_observer", weight_observer)
        if activation_observer is not None:
            modifiers = observe(modifiers, "activation_observer", activation_observer)
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

    def aims_at_experts(self, experts: str) -> bool:
        """Whether a modifier means Linear layers that these experts would have, if unfused."""
        layer = torch.nn.Linear(1, 1, device="meta")
        names = [f"{experts}.0.{part}" for part in EXPERT_PROJECTIONS]
        return any(modifier.aims_at(name, layer) for modifier in self.modifiers for name in names)

    def __repr__(self) -> str:
        parts = [
            f"{stage.name}: {', '.join(modifier.label() for modifier in stage.modifiers)}"
            for stage in self.stages
        ]
        return f"Recipe({'; '.join(parts)})"

    def to_yaml(self) -> str:
        """Write the recipe so that :func:`load_recipe` reads it back."""
        data = {
            f"{stage.name}_stage": {f"{stage.name}_modifiers": _written(stage.modifiers)}
            for stage in self.stages
        }
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


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
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_path(source)):
        return _from_file(FilePath(source), allow_code)
    if isinstance(source, str):
        return _from_text(source, allow_code)
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


def _is_path(text: str) -> bool:
    if "\n" in text:
        return False
    is_there = os.path.exists(text) and not os.path.isdir(text)
    return is_there or text.lower().endswith(_SUFFIXES)


def _from_file(path: FilePath, allow_code: bool) -> Recipe:
    try:
        text = read_whole(path, _LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise RecipeError(f"The recipe '{path}' cannot be read: {reason}") from None
    return _from_document(replace(read_document(text, str(path)), allow_code=allow_code))


def _from_text(text: str, allow_code: bool) -> Recipe:
    document = read_document(text, "recipe")
    if isinstance(document.data, str):
        return _from_preset(document.data)
    return _from_document(replace(document, allow_code=allow_code))


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
            stages.append(_stage(document, key, body))
        elif _is_group(key):
            stages.append(Stage(_DEFAULT, tuple(_modifiers(document, body, (key,)))))
        else:
            unknown = _unknown_key(key, "the recipe", ["<name>_stage"])
            raise document.located(unknown, (key,))
    return _checked(stages, document)


def _stage(document: Document, key: str, body: Any) -> Stage:
    found: list[Modifier] = []
    for group, inner in _mapping(document, body, (key,), f"'{key}'").items():
        if not _is_group(group):
            unknown = _unknown_key(group, f"'{key}'", ["<name>_modifiers"])
            raise document.located(unknown, (key, group))
        found.extend(_modifiers(document, inner, (key, group)))
    return Stage(key.removesuffix("_stage"), tuple(found))


def _is_group(key: str) -> bool:
    return key == "modifiers" or (key.endswith("_modifiers") and key != "_modifiers")


def _unknown_key(key: str, owner: str, shapes: list[str]) -> RecipeError:
    if key in STEPS:
        hint = "Put it under 'modifiers:'."
        return RecipeError(f"'{key}' stands directly in {owner}", hint=hint)
    words = {
        shape.replace("<name>", name) for shape in shapes for name in ("quantization", _DEFAULT)
    }
    return RecipeError(
        f"unknown key '{key}' in {owner}",
        meant=nearest(key, ["modifiers", *sorted(words)]),
        allowed=[*shapes, "modifiers"],
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
            yield _modifier(document, name, fields, (*path, name))


def _modifier(document: Document, name: str, fields: Any, path: Path) -> Modifier:
    if name in _FOREIGN and name not in STEPS:
        absent = RecipeError(f"Calipers does not have '{name}'", allowed=STEPS.names())
        raise document.located(absent, path)
    try:
        kind = STEPS.get(name)
    except ConfigurationError as error:
        raise document.located(RecipeError.of(error), path) from None
    if isinstance(fields, kind):
        return fields
    given = {} if fields is None else _mapping(document, fields, path, f"'{name}'")
    try:
        modifier = kind(**given)
    except RecipeError as error:
        raise document.located(error, path) from None
    _settle_code(modifier, document, path)
    return modifier


def _mapping(document: Document, data: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise document.error(f"{what} must be a mapping", path, got=_shown(data))
    return {str(key): value for key, value in data.items()}


def _shown(data: Any) -> str:
    return "nothing" if data is None else repr(data)[:80]


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


def _written(modifiers: tuple[Modifier, ...]) -> Any:
    """Return modifiers as a mapping, or as a list where one kind occurs twice."""
    pairs = [(type(modifier).__name__, modifier.to_data()) for modifier in modifiers]
    if len({name for name, _ in pairs}) == len(pairs):
        return dict(pairs)
    return [{name: data} for name, data in pairs]
