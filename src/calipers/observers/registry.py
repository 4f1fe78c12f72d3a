"""The names of observers: those built in, those of packages, and those of classes in files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from calipers.errors import ConfigurationError, UnknownObserverError, code_not_allowed
from calipers.registry import Registry, standardize

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
