"""The names of observers: those built in, those of packages, and classes in files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from calipers.errors import ConfigurationError, UnknownObserverError, code_not_allowed
from calipers.observers.compatibility import construct
from calipers.registry import Registry, standardize

C = TypeVar("C", bound=type)

_BUILT_IN = {
    "entropy": "histogram:EntropyObserver",
    "histogram_mse": "histogram:HistogramMSEObserver",
    "imatrix_mse": "imatrix:IMatrixMSEObserver",
    "memoryless_minmax": "minmax:MemorylessMinMaxObserver",
    "memoryless_mse": "mse:MemorylessMSEObserver",
    "minmax": "minmax:MinMaxObserver",
    "mse": "mse:MovingAverageMSEObserver",
    "nvfp4_expanded_imatrix": "imatrix:NVFP4ExpandedIMatrixObserver",
    "nvfp4_expanded_mse": "mse:NVFP4ExpandedMSEObserver",
    "optimal": "optimal:OptimalObserver",
    "percentile": "histogram:PercentileObserver",
    "static_minmax": "minmax:StaticMinMaxObserver",
    "value_counts": "histogram:ValueCountsObserver",
}


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


class Registered:
    """Lets a base class know its subclasses by name; ``registry`` is its own."""

    registry: ClassVar[Registry[Any]]

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
        found: type[Self]
        if isinstance(name, str) and is_file_of_code(name):
            found = _class_in_file(name, cls.registry.base or object, allow_code)
        else:
            found = cls.registry.get(name)
        return found

    @classmethod
    def load_from_registry(
        cls, name: str, *, allow_code: bool = True, **constructor_kwargs: Any
    ) -> Self:
        """Build an object by name; ``allow_code`` as for :meth:`get_value_from_registry`."""
        found = cls.get_value_from_registry(name, allow_code=allow_code)
        built: Self = construct(found, constructor_kwargs)
        return built

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


def _class_in_file(name: str, base: type, allow_code: bool) -> Any:
    path, _, class_name = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigurationError(f"There is no file '{path}' to load '{class_name}' from")
    if not allow_code and _module_name(Path(path)) not in sys.modules:
        raise code_not_allowed(name)
    found = getattr(_module_of(Path(path)), class_name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        problem = f"'{path}' has no class '{class_name}' derived from {base.__name__}"
        raise ConfigurationError(problem)
    return found


def _module_name(path: Path) -> str:
    return f"calipers_plugin:{path.resolve()}"


def _module_of(path: Path) -> ModuleType:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ConfigurationError(f"Loading '{path}' failed: {error!r}") from error
    return module
