"""Operations, the backends that run them, and the choice among those.

An :class:`Operation` has one signature and one reference, in torch, that runs on any device. A
:class:`Backend` has faster implementations of some operations, for the tensors that it accepts.
Callers call the operation; which backend runs is decided here alone.

``CALIPERS_BACKEND`` in the environment names the backends that may run, the first choice first and
with commas between them; ``torch`` alone is the reference everywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from calipers.errors import CalipersWarning, ConfigurationError, nearest, text_of
from calipers.numerics.formats import Format
from calipers.registry import Registry, standardize

P = ParamSpec("P")
R = TypeVar("R")

SWITCH = "CALIPERS_BACKEND"
REFERENCE = "torch"


class Workload(NamedTuple):
    """What a call asks of a backend: to read these tensors, in this format, by this norm."""

    tensors: tuple[Tensor, ...]
    fmt: Format | None = None
    norm: float = 2.0


@dataclass(frozen=True)
class Accepts:
    """The workloads that a backend takes.

    :param devices: types of devices; None for all
    :param dtypes: of every tensor; None for all
    :param highest_norm: the highest power of errors
    :param grids: returns the names of the number grids that it rounds to; None for all
    """

    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    highest_norm: float = float("inf")
    grids: Callable[[], tuple[str, ...]] | None = None

    def __call__(self, workload: Workload) -> bool:
        """Whether a call with such a workload can be given to the backend."""
        for tensor in workload.tensors:
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return False
            device = "cpu" if tensor.is_cpu else tensor.device.type  # the latter takes a while
            if self.devices is not None and device not in self.devices:
                return False
            if not _has_memory(tensor):
                return False
        if workload.norm > self.highest_norm:
            return False
        fmt = workload.fmt
        return fmt is None or self.grids is None or fmt.grid.native_name in self.grids()


def _has_memory(tensor: Tensor) -> bool:
    """Whether there are numbers to be read; distributed, fake and traced tensors have none."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0  # zero for empty tensors, too
    except RuntimeError:
        return False


class Status(NamedTuple):
    """Whether a backend can run on this machine, and why.

    :param warning: what users are told once if it cannot, though it was to; None to say nothing
    """

    is_usable: bool
    reason: str
    warning: str | None = None


@dataclass(frozen=True, eq=False)
class Backend:
    """A place where operations run.

    :param package: the package with its implementations, in modules named as those of the
        references: what ``calipers/kernels/search.py`` defines is looked for in ``search.py``.
        None if they are registered already.
    :param status: says whether it can be used; it is asked when an operation is called first
    :param details: further facts for ``calipers doctor``, where it can be used
    """

    name: str
    accepts: Accepts = Accepts()
    package: str | None = None
    status: Callable[[], Status] = field(default=lambda: Status(True, "it is registered"))
    details: Callable[[], Mapping[str, Any]] = field(default=dict)


class Declined(NamedTuple):
    """What an implementation returns that leaves a call to the next backend."""

    reason: str


class Operation(Generic[P, R]):
    """A function with a reference in torch, and with faster implementations in some backends.

    Backends are tried in their order. One that does not accept the tensors is passed over, and so
    is one whose implementation returns :class:`Declined`, which it does before it writes to
    anything. What an implementation raises is raised.

    >>> from calipers.kernels.reductions import sum_of_squares
    >>> sum_of_squares.backends[-1]
    'torch'
    >>> sum_of_squares.using("torch")(torch.tensor([[3.0]]))
    tensor([9.], dtype=torch.float64)
    """

    __name__: str

    def __init__(self, reference: Callable[P, R], workload: Callable[..., Workload]) -> None:
        update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self._workload = workload
        self._registered: dict[str, tuple[Callable[P, R | Declined], Accepts]] = {}
        # The choice of backends that these implementations are of, in their order.
        self._choice: object = None
        self._chosen: tuple[tuple[Callable[P, R | Declined], Accepts], ...] = ()
        assert self.name not in _OPERATIONS, f"two operations are named {self.name}"
        _OPERATIONS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first implementation that takes these arguments, else the reference."""
        workload = self._workload(*args, **kwargs)
        choice = chosen_backends()
        if self._choice is not choice:
            found = (self._implementation(backend) for backend in choice)
            self._chosen = tuple(each for each in found if each is not None)
            self._choice = choice  # last: another thread may be here, too
        for function, accepts in self._chosen:
            if accepts(workload):
                result = function(*args, **kwargs)
                if not isinstance(result, Declined):
                    return result
        return self.reference(*args, **kwargs)

    def register(
        self, backend: Backend, **restrictions: Any
    ) -> Callable[[Callable[P, R | Declined]], Callable[P, R | Declined]]:
        """Make the decorated function, of the same signature, the implementation of a backend.

        :param restrictions: fields of :class:`Accepts` in which this operation differs
        """

        def decorate(function: Callable[P, R | Declined]) -> Callable[P, R | Declined]:
            accepts = replace(backend.accepts, **restrictions)
            self._registered[backend.name] = function, accepts
            self._choice = None
            return function

        return decorate

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that can run this, in the order in which they are tried, torch last."""
        usable = (each for each in chosen_backends() if each.status().is_usable)
        return (*(each.name for each in usable if self._implementation(each)), REFERENCE)

    def using(self, backend: str) -> Callable[P, R]:
        """Return the implementation of one backend, whatever it accepts."""
        if backend == REFERENCE:
            return self.reference
        for each in chosen_backends():
            if each.name == backend and each.status().is_usable:
                found = self._implementation(each)
                if found is not None:
                    return cast(Callable[P, R], found[0])
        raise ConfigurationError(
            f"{self.name} has no backend '{backend}'",
            meant=nearest(backend, self.backends),
            allowed=self.backends,
        )

    def _implementation(self, backend: Backend) -> tuple[Callable[P, R | Declined], Accepts] | None:
        """Return how a backend runs this, and for which workloads; None if it does not."""
        status = backend.status()
        if not status.is_usable:
            if status.warning is None:
                return None

            def decline(*_: P.args, **__: P.kwargs) -> Declined:
                _warn_once(status.warning)
                return Declined(status.reason)

            return decline, replace(backend.accepts, grids=None)
        if backend.name not in self._registered and backend.package is not None:
            module = f"{backend.package}.{self.reference.__module__.rpartition('.')[2]}"
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
        return self._registered.get(backend.name)


_OPERATIONS: dict[str, Operation[..., Any]] = {}


def operation(workload: Callable[..., Workload]) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Make the decorated function, in torch, the reference of an operation of its name.

    :param workload: tells of the arguments of a call what backends are to accept
    """
    return lambda reference: Operation(reference, workload)


def operations() -> dict[str, Operation[..., Any]]:
    """Return all operations of Calipers by their names."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg and not module.name.startswith("_"):
            importlib.import_module(f"{__package__}.{module.name}")
    return dict(_OPERATIONS)


# Backends

BACKENDS: Registry[Backend] = Registry(
    "backend",
    "calipers.backends",
    {"native": f"{__package__}.native:BACKEND"},
    base=Backend,
    holds_objects=True,
    spelling=standardize,
)
"""The backends that ship, and those of packages."""
_added: dict[str, Backend] = {}


def add_backend(backend: Backend) -> None:
    """Let a backend be chosen in this process, before those that ship.

    A package that is installed names its own under ``calipers.backends`` of its entry points.
    """
    _added[standardize(backend.name)] = backend
    chosen_backends.cache_clear()


def remove_backend(name: str) -> None:
    """Take back what :func:`add_backend` did."""
    _added.pop(standardize(name), None)
    chosen_backends.cache_clear()


@cache
def chosen_backends() -> tuple[Backend, ...]:
    """Return the backends that may run, the first choice first; the reference is behind them."""
    value = os.environ.get(SWITCH, "")
    names = [standardize(name) for name in value.split(",") if name.strip()]
    for name in names:
        if name != REFERENCE and name not in _added and name not in BACKENDS:
            known = (REFERENCE, *_backends_in_order())
            raise ConfigurationError(
                f"there is no backend '{name}'",
                where=f"{SWITCH}={value}",
                meant=nearest(name, known),
                allowed=known,
            )
    chosen = []
    for name in names or _backends_in_order():
        if name == REFERENCE:
            break  # it takes whatever comes
        backend = _added.get(name) or _loaded(name)
        if names and not (status := backend.status()).is_usable:
            raise ConfigurationError(
                f"the backend {name} cannot be used here: {status.reason}",
                where=f"{SWITCH}={value}",
            )
        chosen.append(backend)
    return tuple(chosen)


def _backends_in_order() -> list[str]:
    """Return all names: what was added, then what packages bring, then what ships."""
    ships, *others = BACKENDS.names()
    return list(dict.fromkeys((*_added, *others, ships)))


def _loaded(name: str) -> Backend:
    """Load a backend; one that fails is left out, with a warning."""
    try:
        return BACKENDS.get(name)
    except ConfigurationError as error:
        if error.__cause__ is None:  # the name stands for two
            raise
        reason, warning = str(error.__cause__), f"Calipers runs without it: {text_of(error)}"
    return Backend(name, status=lambda: Status(False, reason, warning))


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, CalipersWarning, stacklevel=4)


# Which backends run which operations, and why


@dataclass(frozen=True)
class BackendReport:
    """Whether a backend runs, and why."""

    name: str
    is_usable: bool
    reason: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    details: dict[str, Any]

    def __str__(self) -> str:
        if not self.is_usable:
            return f"{self.name}: not used, {self.reason}"
        dtypes = ", ".join(self.dtypes) or "all dtypes"
        devices = ", ".join(self.devices) or "any device"
        isa = self.details.get("instruction_set")
        reason = f"instruction set: {isa} ({self.reason})" if isa else self.reason
        return f"{self.name}: {dtypes} on {devices}; {reason}"


@dataclass(frozen=True)
class KernelReport:
    """What runs where.

    :param backends: in the order in which they are tried; what none of them takes runs in torch
    :param operations: the backends that have each operation
    """

    backends: tuple[BackendReport, ...]
    operations: dict[str, tuple[str, ...]]
    threads: int

    def details(self, backend: str) -> dict[str, Any]:
        """Return further facts of a backend; none where it does not run."""
        return next((each.details for each in self.backends if each.name == backend), {})

    @property
    def instruction_set(self) -> str | None:
        """The instruction set of the native kernels; None where they do not run."""
        return self.details("native").get("instruction_set")

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """Those that this machine has native kernels for."""
        return tuple(self.details("native").get("instruction_sets", ()))

    def __str__(self) -> str:
        lines = [str(each) for each in self.backends]
        named = os.environ.get(SWITCH)
        why = f" ({SWITCH}={named} is set)" if named else ""
        lines.append(f"{REFERENCE}: everything else{why}")
        for backends in dict.fromkeys(self.operations.values()):
            names = (name for name, those in self.operations.items() if those == backends)
            lines.append(f"{', then '.join(backends)}: {', '.join(names)}")
        return "\n".join([*lines, f"threads: {self.threads} (torch.get_num_threads)"])


def describe() -> KernelReport:
    """Say which kernels run, and why.

    >>> describe().threads == torch.get_num_threads()
    True
    """
    backends = []
    for backend in chosen_backends():
        status, accepts = backend.status(), backend.accepts
        details = dict(backend.details()) if status.is_usable else {}
        dtypes = tuple(str(each).removeprefix("torch.") for each in accepts.dtypes or ())
        facts = status.is_usable, status.reason, accepts.devices or (), dtypes, details
        backends.append(BackendReport(backend.name, *facts))
    found = {name: each.backends for name, each in sorted(operations().items())}
    return KernelReport(tuple(backends), found, torch.get_num_threads())
