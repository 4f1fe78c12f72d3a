"""Named parts: those that are built in, those that code registers, those of installed packages."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from calipers.errors import CalipersError, CalipersWarning, ConfigurationError, nearest

T = TypeVar("T")
Part = TypeVar("Part", bound=Callable[..., Any])


def standardize(name: str) -> str:
    """Return a name in lower case with underscores: one spelling for several.

    >>> standardize(" Static-MinMax")
    'static_minmax'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


_REMEDY = "Update the package, or uninstall it"


@dataclass(frozen=True)
class _Source:
    """Where a part comes from.

    :param reference: ``module:attribute``, by which two sources of one part are recognized
    :param package: the installed package that declares it; empty for others
    :param part: the part itself; None until it is imported
    """

    reference: str
    package: str = ""
    part: Any = None

    def __str__(self) -> str:
        name = self.reference.replace(":", ".")
        return f"{name} of the package {self.package}" if self.package else name


class Registry(Generic[T]):
    """Parts of one kind by name; each is imported when it is asked for, and not before.

    Entry points of installed packages are read when a part is asked for; a name that stands for
    two parts is refused when it is looked up, and when all names are asked for.

    :param what: what messages call a part, such as ``observer``
    :param group: the group of entry points by which packages add parts
    :param built_in: name → ``module:attribute``
    :param aliases: another name → name
    :param base: the class that every part is a subclass of; None: parts are functions
    :param holds_objects: whether parts are objects of that class instead
    :param spelling: gives all spellings of a name the same form
    :param error: the error about an unknown name
    :param hint: how else a part may be given

    >>> registry = Registry("format of dates", "nowhere", {"iso": "datetime:date.isoformat"})
    >>> registry.names(), registry.get("iso").__name__
    (['iso'], 'isoformat')
    >>> registry.get("ios")
    Traceback (most recent call last):
    calipers.errors.base.ConfigurationError: unknown format of dates 'ios'. Did you mean 'iso'? \
Allowed: iso.
    """

    def __init__(
        self,
        what: str,
        group: str,
        built_in: Mapping[str, str] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        base: type | None = None,
        holds_objects: bool = False,
        spelling: Callable[[str], str] = str.strip,
        error: type[CalipersError] = ConfigurationError,
        hint: str = "",
    ) -> None:
        self.what, self.group, self.base = what, group, base
        self._holds_objects = holds_objects
        self._spelling, self._error, self._hint = spelling, error, hint
        self._sources = {name: _Source(place) for name, place in (built_in or {}).items()}
        self._built_in = frozenset(self._sources)
        self._aliases = dict(aliases or {})
        self._has_entry_points = False
        self._conflicts: dict[str, tuple[_Source, _Source]] = {}
        self._broken: set[str] = set()

    def register(
        self, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> Callable[[Part], Part]:
        """Return a decorator that registers a part under a name, or its own, and under aliases."""

        def decorate(part: Part) -> Part:
            self.add(part, name, alias)
            return part

        return decorate

    def add(
        self, part: Any, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> None:
        """Register a part; a name that stands for another one is refused."""
        self._check(part, repr(part))
        source = _Source(_reference(part), part=part)
        key = self._spelling(name or part.__name__)
        aliases = [self._spelling(a) for a in ([alias] if isinstance(alias, str) else alias or ())]
        for word in (key, *aliases):
            present = self._sources.get(self._aliases.get(word, word))
            if present is not None and present.reference != source.reference:
                raise ConfigurationError(
                    f"already stands for {present}",
                    subject=f"The name '{word}'",
                    hint=f"Choose another one for {source}",
                )
        self._sources[key] = source
        self._aliases.update(dict.fromkeys(aliases, key))

    def get(self, name: str) -> T:
        """Return the part of a name; refuse a name that is not known, or that stands for two."""
        key = self._key(name)
        if key is None:
            names = self.names()
            raise self._error(
                f"unknown {self.what} '{name}'",
                meant=nearest(str(name), names),
                allowed=names,
                hint=self._hint,
            )
        self._refuse_conflict(key)
        try:
            return self._imported(key)
        except Exception as error:
            if not self._sources[key].package:
                raise
            raise ConfigurationError(self._failure(key, error), hint=_REMEDY) from error

    def __contains__(self, name: object) -> bool:
        """Whether a name stands for a part, which need not be importable."""
        return self._key(name) is not None

    def names(self) -> list[str]:
        """Return the names: those of built-in parts, then others in the order they came."""
        self._read_entry_points()
        for key in self._conflicts:
            self._refuse_conflict(key)
        return list(self._sources)

    def added(self) -> list[str]:
        """Return the names of parts that are not built in."""
        return [name for name in self.names() if name not in self._built_in]

    def parts(self) -> Iterator[tuple[str, T]]:
        """Give all parts by name; one that cannot be imported is left out, with one warning."""
        for name in self.names():
            try:
                part = self._imported(name)
            except Exception as error:
                if not self._sources[name].package:
                    raise
                if name not in self._broken:
                    self._broken.add(name)
                    warning = CalipersWarning(self._failure(name, error), hint=_REMEDY)
                    warnings.warn(warning, stacklevel=2)
            else:
                yield name, part

    def aliases(self) -> dict[str, str]:
        """Return the other names, each with the name it stands for."""
        return dict(self._aliases)

    def name_of(self, part: Any) -> str | None:
        """Return the name of a part; None for one that is not registered."""
        reference = _reference(part)
        self._read_entry_points()
        for name, source in self._sources.items():
            if source.part is part or (source.part is None and source.reference == reference):
                return name
        return None

    def _key(self, name: object) -> str | None:
        """Return the form under which a name is known; None for one that is not."""
        if not isinstance(name, str):
            return None
        self._read_entry_points()
        key = self._spelling(name)
        key = self._aliases.get(key, key)
        return key if key in self._sources else None

    def _imported(self, key: str) -> T:
        source = self._sources[key]
        if source.part is None:
            module, _, path = source.reference.partition(":")
            part: Any = importlib.import_module(module)
            for attribute in path.split("."):
                part = getattr(part, attribute)
            self._check(part, str(source))
            # The module may have registered the part itself by now.
            self._sources[key] = _Source(source.reference, source.package, part)
        return cast("T", self._sources[key].part)

    def _check(self, part: Any, label: str) -> None:
        if self.base is None:
            if not callable(part):
                raise ConfigurationError(f"{label} is not a function")
        elif self._holds_objects:
            if not isinstance(part, self.base):
                raise ConfigurationError(f"{label} is no {self.base.__name__}")
        elif not isinstance(part, type) or not issubclass(part, self.base):
            raise ConfigurationError(f"{label} is not a subclass of {self.base.__name__}")

    def _read_entry_points(self) -> None:
        """Note the names that installed packages add, once; nothing of theirs is imported."""
        if self._has_entry_points:
            return
        self._has_entry_points = True
        for entry in sorted(entry_points(group=self.group), key=lambda e: (e.name, e.value)):
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
            source = _Source(f"{entry.module}:{entry.attr}", package)
            key = self._spelling(entry.name)
            key = self._aliases.get(key, key)
            present = self._sources.setdefault(key, source)
            if present.reference != source.reference:
                self._conflicts.setdefault(key, (present, source))

    def _refuse_conflict(self, key: str) -> None:
        if key in self._conflicts:
            present, other = self._conflicts[key]
            raise ConfigurationError(
                f"stands for two {self.what}s: {present}, and {other}",
                subject=f"The name '{key}'",
                hint="Uninstall one of the packages, or have one renamed",
            )

    def _failure(self, key: str, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        return f"{self.what} '{key}' ({self._sources[key]}) cannot be used: {reason}"


def _reference(part: Any) -> str:
    return f"{part.__module__}:{part.__qualname__}"
