"""What a class of observers says of itself, and by which name it is found.

Names are those built in, those of packages, and those of classes in files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import Self

from calipers.errors import (
    ConfigurationError,
    UnknownObserverError,
    UnsuitableError,
    code_not_allowed,
)
from calipers.numerics.formats import Format
from calipers.observers.compatibility import construct
from calipers.observers.options import ObserverOptions, parse_options
from calipers.registry import Registry, standardize
from calipers.solvers.importance import Importance, importance_named

C = TypeVar("C", bound=type)

_BUILT_IN = {
    "entropy": "histogram:EntropyObserver",
    "histogram_mse": "histogram:HistogramMSEObserver",
    "imatrix_mse": "classic:IMatrixMSEObserver",
    "memoryless_minmax": "classic:MemorylessMinMaxObserver",
    "memoryless_mse": "classic:MemorylessMSEObserver",
    "minmax": "classic:MinMaxObserver",
    "mse": "classic:MovingAverageMSEObserver",
    "nvfp4_expanded_imatrix": "classic:NVFP4ExpandedIMatrixObserver",
    "nvfp4_expanded_mse": "classic:NVFP4ExpandedMSEObserver",
    "optimal": "optimal:OptimalObserver",
    "percentile": "histogram:PercentileObserver",
    "static_minmax": "classic:StaticMinMaxObserver",
    "value_counts": "histogram:ValueCountsObserver",
}


class ObserverClass:
    """The names of a class of observers, its options, and the tensors that it is made for."""

    registry: ClassVar[Registry[Any]]
    Options: ClassVar[type[ObserverOptions] | None] = None
    """Its options; a class that declares none takes any."""
    gathers_inputs: ClassVar[bool] = False
    usual_importance: ClassVar[str] = "none"
    """How the errors of a weight count, unless an option ``importance`` says otherwise."""
    remembers: ClassVar[str] = ""
    when: ClassVar[str] = ""

    # By name

    @classmethod
    def register(
        cls, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> Callable[[C], C]:
        """Return a decorator that makes a subclass known by a name."""
        return cls.registry.register(name, alias)

    @classmethod
    def register_value(
        cls, value: type, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> None:
        """Make a subclass known by a name."""
        cls.registry.add(value, name, alias)

    @classmethod
    def get_value_from_registry(cls, name: str, *, allow_code: bool = True) -> type[Self]:
        """Return the class of that name, or the one in ``path/to/file.py:Class``.

        :param allow_code: whether such a file may run; pass False for a name that comes from data
        """
        kind: type[Self]
        if isinstance(name, str) and is_file_of_code(name):
            kind = class_in_file(name, cls.registry.base or object, allow_code)
        else:
            kind = cls.registry.get(name)
        return kind

    @classmethod
    def load_from_registry(
        cls, name: str, *, allow_code: bool = True, **constructor_kwargs: Any
    ) -> Self:
        """Build an object by name; ``allow_code`` as for :meth:`get_value_from_registry`."""
        kind = cls.get_value_from_registry(name, allow_code=allow_code)
        observer: Self = construct(kind, constructor_kwargs)
        return observer

    @classmethod
    def registered_names(cls) -> list[str]:
        """Return the names of all subclasses, sorted."""
        return sorted(cls.registry.names())

    @classmethod
    def registered_aliases(cls) -> list[str]:
        """Return the other names they go by, sorted."""
        return sorted(cls.registry.aliases())

    @classmethod
    def registered_name(cls) -> str:
        """Return the name of this class; of one that is not registered, that of its definition."""
        return cls.registry.name_of(cls) or cls.__name__

    @classmethod
    def label_of(cls, base_name: str, module_name: str = "") -> str:
        """Return how messages call an observer of this class."""
        of = f" of {module_name}" if module_name else ""
        return f"Observer '{cls.registered_name()}' ({base_name}{of})"

    # By options

    @classmethod
    def checked_options(
        cls, base_name: str, args: QuantizationArgs, given: Mapping[str, Any]
    ) -> ObserverOptions:
        """Return the options; refuse them, or a tensor that the observer is not made for."""
        fmt = Format.of(args)  # refuses what does not exist
        if cls.Options is None:
            given = {key: given[key] for key in given if key in ObserverOptions.model_fields}
        options = parse_options(cls.Options or ObserverOptions, given, cls.registered_name())
        cls.check(base_name, args, options, fmt)
        return options

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse what the observer is not made for, by an ``UnsuitableError``."""

    @classmethod
    def suits(cls, base_name: str, args: QuantizationArgs) -> bool:
        """Whether the observer is made for such a tensor, with its options as they are at first."""
        if cls.gathers_inputs and base_name != "weight":
            return False
        try:
            cls.checked_options(base_name, args, {})
        except UnsuitableError:
            return False
        return True

    @classmethod
    def importance_under(cls, base_name: str, options: ObserverOptions) -> Importance:
        """Return how errors count under some options."""
        chosen = getattr(options, "importance", cls.usual_importance)
        return importance_named(chosen if base_name == "weight" else "none", options.nonfinite)


def observer_registry(base: type) -> Registry[Any]:
    """Return the registry of the subclasses of a base class, with those that are built in."""
    return Registry(
        "observer",
        "calipers.observers",
        {name: f"calipers.observers.{place}" for name, place in _BUILT_IN.items()},
        aliases={"fouroversix": "nvfp4_expanded_mse"},
        base=base,
        spelling=standardize,
        error=UnknownObserverError,
        hint="A class of your own is given as 'path/to/file.py:Class'",
    )


def is_file_of_code(name: str) -> bool:
    """Whether a name is a class in a file: code that runs when the class is asked for.

    >>> is_file_of_code("my/observers.py:Mine"), is_file_of_code("mse")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


def class_in_file(name: str, base: type, allow_code: bool) -> Any:
    """Return a class of a file of code, which runs where that is allowed, or has run before."""
    path, _, class_name = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigurationError(f"There is no file '{path}' to load '{class_name}' from")
    module_name = f"calipers_plugin:{Path(path).resolve()}"
    module = sys.modules.get(module_name)
    if module is None:
        if not allow_code:
            raise code_not_allowed(name)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if not isinstance(error, Exception):
                raise
            raise ConfigurationError(f"Loading '{path}' failed: {error!r}") from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, base):
        problem = f"'{path}' has no class '{class_name}' derived from {base.__name__}"
        raise ConfigurationError(problem)
    return kind
