"""How a recipe may spell observers, arguments and schemes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any

import yaml
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator

from calipers.errors import (
    CodeNotAllowedError,
    ConfigurationError,
    RecipeError,
    UnknownObserverError,
    nearest,
    unsupported_format,
)
from calipers.numerics.formats import Format
from calipers.numerics.library_versions import named_observer
from calipers.observers import Observer
from calipers.observers.options import ObserverOptions, parse_options
from calipers.planning.specs import SCHEME_FIELDS
from calipers.steps.base import Path, Patterns, read_patterns, to_plain

ARGS_FIELDS = tuple(SCHEME_FIELDS.values())
"""The fields of a scheme that hold arguments."""

_WORDS: Mapping[str, type[Enum]] = {"type": QuantizationType, "strategy": QuantizationStrategy}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    **PRESET_SCHEMES,
    "W8A8_STATIC": {
        "weights": QuantizationArgs(num_bits=8, strategy="channel"),
        "input_activations": QuantizationArgs(num_bits=8, strategy="tensor"),
    },
}
"""The schemes that have names: those of compressed-tensors, and one that it lacks."""

_ALWAYS_WRITTEN = ("num_bits", "type", "symmetric", "strategy")


class ObserverChoice(BaseModel):
    """An observer by its name, with options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    options: dict[str, Any] = {}

    def to_data(self) -> Any:
        """Return the shortest spelling."""
        return {"name": self.name, **to_plain(self.options)} if self.options else self.name

    def put_into(self, args: QuantizationArgs) -> QuantizationArgs:
        """Return a copy of the arguments that names this observer."""
        chosen = {"observer": self.name, "observer_kwargs": dict(self.options)}
        observed: QuantizationArgs = args.model_copy(update=chosen, deep=True)
        return observed


def read_choice(value: Any) -> ObserverChoice:
    """Read ``mse``, ``mse,grid=50`` or ``{name: mse, grid: 50}``; name and options must exist.

    >>> read_choice("mse,grid=50") == read_choice({"name": "mse", "grid": 50})
    True
    """
    if isinstance(value, ObserverChoice):
        return value
    if isinstance(value, str):
        name, *parts = (part.strip() for part in value.split(","))
        chosen: dict[str, Any] = {}
        for part in parts:
            key, equals, option = part.partition("=")
            if not (key and equals):
                problem = f"'{part}' in '{value}' is no option of an observer"
                raise ConfigurationError(problem, hint="Give NAME=VALUE")
            chosen[key.strip()] = yaml.safe_load(option)
        value = {"name": name, **chosen}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigurationError(
            "an observer is given by its name, such as mse, or as a mapping with the key 'name', "
            "such as {name: mse, averaging_constant: 0.01}",
            got=repr(value),
        )
    options = {key: option for key, option in value.items() if key != "name"}
    check_observer(value["name"], options, "name")
    return ObserverChoice(name=value["name"], options=options)


def read_args(value: Any) -> QuantizationArgs:
    """Read the arguments of one tensor into a copy of their own."""
    if isinstance(value, QuantizationArgs):
        args = value.model_copy(deep=True)
    elif isinstance(value, Mapping):
        # Words and numbers of which compressed-tensors would not say what is allowed:
        for key, words in _WORDS.items():
            word, known = value.get(key), [str(each.value) for each in words]
            if isinstance(word, str) and word.lower() not in known:
                problem, meant = f"unknown {key} '{word}'", nearest(word, known)
                raise RecipeError(problem, meant=meant, allowed=known, path=(key,))
        size = value.get("group_size")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            must = "group_size must be an integer"
            raise RecipeError(must, got=repr(size), path=("group_size",))
        args = _parse(QuantizationArgs, dict(value))
    else:
        raise ConfigurationError("must be a mapping such as {num_bits: 8}", got=repr(value))
    Format.of(args)
    if named_observer(args) is not None:
        check_observer(args.observer, args.observer_kwargs or {}, "observer")
    return args


Args = Annotated[QuantizationArgs, PlainValidator(read_args)]


class _Scheme(BaseModel):
    """A scheme as a recipe spells it."""

    model_config = ConfigDict(extra="forbid")

    targets: Patterns = ()
    weights: Args | None = None
    input_activations: Args | None = None
    output_activations: Args | None = None
    format: str | None = None


def read_scheme(value: Any) -> QuantizationScheme:
    """Read an explicit scheme into a copy of its own; ``targets`` may be left out."""
    if isinstance(value, QuantizationScheme):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if not isinstance(value, Mapping):
        raise ConfigurationError("must be a mapping with weights or activations", got=repr(value))
    read = _Scheme.model_validate(dict(value))
    given = {name: getattr(read, name) for name in _Scheme.model_fields}
    return build_scheme({**given, "targets": list(read.targets)})


def build_scheme(given: dict[str, Any]) -> QuantizationScheme:
    """Build a scheme; what compressed-tensors does not allow is an error of the user."""
    scheme: QuantizationScheme = _parse(QuantizationScheme, given)
    return scheme


def read_scheme_choice(value: Any) -> str | dict[str, tuple[str, ...]] | QuantizationScheme | None:
    """Read a preset, a mapping of presets to their targets, or an explicit scheme."""
    if value is None:
        return None
    if isinstance(value, str):
        return preset_name(value)
    is_scheme = not isinstance(value, Mapping) or bool(
        set(value) & set(QuantizationScheme.model_fields)
        or any(isinstance(each, Mapping) for each in value.values())
    )
    if is_scheme:
        return read_scheme(value)
    return {preset_name(str(name), (name,)): _targets(each) for name, each in value.items()}


def preset_name(name: str, path: Path = ()) -> str:
    """Return the name of a preset, spelt as it should be.

    >>> preset_name("w4a16")
    'W4A16'
    """
    key = name.strip().upper()
    if key not in PRESETS:
        raise RecipeError(
            f"unknown scheme '{name}'",
            meant=nearest(name, PRESETS),
            allowed=sorted(PRESETS),
            path=path,
        )
    return key


def preset(name: str, targets: tuple[str, ...]) -> QuantizationScheme:
    """Return a new scheme for a preset."""
    parts = copy.deepcopy(dict(PRESETS[preset_name(name)]))
    return build_scheme({**parts, "targets": list(targets)})


def args_to_data(args: QuantizationArgs) -> dict[str, Any]:
    """Return arguments as plain data, without what follows from the rest."""
    fields = type(args).model_fields
    inferred = _parse(QuantizationArgs, {**_unlike_defaults(args), "zp_dtype": None})
    written = _unlike_defaults(args)
    if args.zp_dtype == inferred.zp_dtype:
        written.pop("zp_dtype", None)
    written |= {name: getattr(args, name) for name in _ALWAYS_WRITTEN}
    plain: dict[str, Any] = to_plain({name: written[name] for name in fields if name in written})
    return plain


def scheme_to_data(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return a scheme as plain data."""
    data: dict[str, Any] = {"targets": list(scheme.targets)} if scheme.targets else {}
    for name in ARGS_FIELDS:
        if getattr(scheme, name) is not None:
            data[name] = args_to_data(getattr(scheme, name))
    return {**data, "format": str(scheme.format)} if scheme.format else data


def to_data(value: Any) -> Any:
    """Return the value of a key as plain data."""
    if isinstance(value, QuantizationArgs):
        return args_to_data(value)
    if isinstance(value, QuantizationScheme):
        return scheme_to_data(value)
    if isinstance(value, dict):
        return {name: to_data(each) for name, each in value.items()}
    return to_plain(value)


def without_order(value: Any) -> Any:
    """Return fields whose schemes have no order of columns."""
    if isinstance(value, dict):
        return {name: without_order(each) for name, each in value.items()}
    if isinstance(value, QuantizationScheme):
        return value.model_copy(update={"weights": without_order(value.weights)})
    if isinstance(value, QuantizationArgs):
        return value.model_copy(update={"actorder": None})
    return value


def _with_presets(value: Any) -> Any:
    """Let a preset's name stand before its targets."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ConfigurationError(
            "must map names of groups to schemes with targets", got=repr(value)
        )
    return {
        str(name): each if isinstance(each, Mapping | BaseModel) else preset(name, _targets(each))
        for name, each in value.items()
    }


Choice = Annotated[ObserverChoice, PlainValidator(read_choice)]
Scheme = Annotated[QuantizationScheme, PlainValidator(read_scheme)]
SchemeChoice = Annotated[
    str | dict[str, tuple[str, ...]] | QuantizationScheme | None, PlainValidator(read_scheme_choice)
]
Groups = Annotated[dict[str, Scheme] | None, BeforeValidator(_with_presets)]


def _no_bare_name(value: Any) -> Any:
    if not isinstance(value, Mapping | BaseModel):
        raise ConfigurationError(
            "must say for which tensors, such as {weights: mse, input: minmax}",
            got=repr(value),
            hint="For weights alone use 'weight_observer'",
        )
    return value


class ObserverChoices(BaseModel):
    """Observers by the tensors they watch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Choice | None = None
    input: Choice | None = None
    output: Choice | None = None


Choices = Annotated[ObserverChoices, BeforeValidator(_no_bare_name)]


def named_observers(value: Any, path: Path = ()) -> Iterator[tuple[Path, ObserverChoice]]:
    """Go through all observers that a modifier names, each with the keys that lead to its name."""
    if isinstance(value, ObserverChoice):
        yield path, value
    elif isinstance(value, QuantizationArgs):
        if named_observer(value) is not None:
            options = value.observer_kwargs or {}
            yield (*path, "observer"), ObserverChoice(name=value.observer, options=options)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from named_observers(getattr(value, name), (*path, name))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from named_observers(each, (*path, name))


def check_observer(
    name: str, options: Mapping[str, Any], key: str, *, allow_code: bool = False
) -> None:
    """Refuse an observer that does not exist, and options that it does not have.

    A class in a file is looked at only where that file may run, or has run.
    """
    try:
        cls = Observer.get_value_from_registry(name, allow_code=allow_code)
    except CodeNotAllowedError:
        return
    except UnknownObserverError as error:
        raise RecipeError.of(error, path=(key,)) from None
    if cls.Options is None:
        return
    known: type[ObserverOptions] = cls.Options
    try:
        parse_options(known, options, cls.registered_name())
    except ConfigurationError as error:
        unknown = [name for name in options if name not in known.model_fields]
        raise RecipeError.of(error, path=unknown[:1]) from None


def _parse(model: type[Any], given: dict[str, Any]) -> Any:
    """Let compressed-tensors check; what it does not implement is an error of the user, too."""
    try:
        return model.model_validate(given)
    except NotImplementedError as error:
        if model is QuantizationArgs:
            what = f"{given.get('type', 'int')} with {given.get('num_bits', 8)} bits"
            raise unsupported_format(what) from None
        raise ConfigurationError(str(error)) from None


def _targets(value: Any) -> tuple[str, ...]:
    named = read_patterns(value)
    if not named:
        raise ConfigurationError("a preset needs its targets, such as [Linear]", got=repr(value))
    return named


def _unlike_defaults(args: QuantizationArgs) -> dict[str, Any]:
    fields = type(args).model_fields
    return {
        name: getattr(args, name)
        for name in fields
        if getattr(args, name) != fields[name].get_default(call_default_factory=True)
    }
