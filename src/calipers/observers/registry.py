"""Classes by name: case, ``_``, ``-`` and spaces do not matter; files with a class are loaded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import Self

from calipers.errors import ConfigurationError, UnknownObserverError, code_not_allowed, nearest
from calipers.observers.compatibility import construct

T = TypeVar("T")
C = TypeVar("C", bound=type)


def standardize(name: str) -> str:
    """Return the form under which a name is kept.

    >>> standardize("Static-MinMax")
    'static_minmax'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def is_file_of_code(name: str) -> bool:
    """Whether a name is a class in a file: code that runs when the class is asked for.

    >>> is_file_of_code("my/observers.py:Mine"), is_file_of_code("mse")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


class Registry(Generic[T]):
    """The subclasses of ``base`` that can be named in a recipe."""

    def __init__(self, base: type[T]) -> None:
        self._base = base
        self._classes: dict[str, type[T]] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str | None, alias: str | Iterable[str] | None) -> Callable[[C], C]:
        """Return a decorator that registers a class under a name and its aliases."""

        def decorate(cls: C) -> C:
            self.add(cls, name, alias)
            return cls

        return decorate

    def add(self, cls: type[T], name: str | None, alias: str | Iterable[str] | None) -> None:
        """Register a class; a name that stands for another class is refused."""
        if not isinstance(cls, type) or not issubclass(cls, self._base):
            raise ConfigurationError(f"{cls!r} is not a subclass of {self._base.__name__}")
        key = standardize(name or cls.__name__)
        aliases = [alias] if isinstance(alias, str) else list(alias or ())
        for word in (key, *map(standardize, aliases)):
            present = self._classes.get(self._aliases.get(word, word))
            if present is not None and _identity(present) != _identity(cls):
                raise ConfigurationError(
                    f"already stands for {present.__module__}.{present.__qualname__}",
                    subject=f"The name '{word}'",
                    hint=f"Choose another one for {cls.__qualname__}",
                )
        self._classes[key] = cls
        self._aliases.update((standardize(word), key) for word in aliases)

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._classes)

    def aliases(self) -> list[str]:
        """Return the other names they go by, sorted."""
        return sorted(self._aliases)

    def aliases_of(self, cls: type) -> list[str]:
        """Return the other names of a class, sorted."""
        return [alias for alias in self.aliases() if self._classes[self._aliases[alias]] is cls]

    def find(self, name: str, *, allow_code: bool) -> type[T]:
        """Return the class of that name, or the one in ``path/to/file.py:Class``.

        :param allow_code: whether such a file may run; without it, the class is found only if its
            file was allowed to run before
        """
        if not isinstance(name, str):
            raise self._unknown(str(name))
        if is_file_of_code(name):
            path, _, class_name = name.rpartition(":")
            return self._load(Path(path), class_name, allow_code)
        key = standardize(name)
        key = self._aliases.get(key, key)
        if key not in self._classes:
            raise self._unknown(name)
        return self._classes[key]

    def name_of(self, cls: type) -> str:
        """Return the name of a class, or of the class itself if it is not registered."""
        return next((key for key, known in self._classes.items() if known is cls), cls.__name__)

    def _unknown(self, name: str) -> UnknownObserverError:
        return UnknownObserverError(
            f"Unknown observer '{name}'",
            meant=nearest(name, self.names()),
            allowed=self.names(),
            hint="A class of your own is given as 'path/to/file.py:Class'",
        )

    def _load(self, path: Path, class_name: str, allow_code: bool) -> type[T]:
        if not path.is_file():
            raise ConfigurationError(f"There is no file '{path}' to load '{class_name}' from")
        if not allow_code and _module_name(path) not in sys.modules:
            raise code_not_allowed(f"{path}:{class_name}")
        found = getattr(_module_of(path), class_name, None)
        if not isinstance(found, type) or not issubclass(found, self._base):
            raise ConfigurationError(
                f"'{path}' has no class '{class_name}' derived from {self._base.__name__}"
            )
        return found


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
        return cls.registry.find(name, allow_code=allow_code)

    @classmethod
    def load_from_registry(
        cls, name: str, *, allow_code: bool = True, **constructor_kwargs: Any
    ) -> Self:
        """Build an object by name; ``allow_code`` as for :meth:`get_value_from_registry`."""
        found = cls.registry.find(name, allow_code=allow_code)
        built: Self = construct(found, constructor_kwargs)
        return built

    @classmethod
    def registered_names(cls) -> list[str]:
        """Return the names of all subclasses, sorted."""
        return cls.registry.names()

    @classmethod
    def registered_aliases(cls) -> list[str]:
        """Return the other names they go by, sorted."""
        return cls.registry.aliases()

    @classmethod
    def registered_name(cls) -> str:
        """Return the name of this class in the registry."""
        return cls.registry.name_of(cls)


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


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
