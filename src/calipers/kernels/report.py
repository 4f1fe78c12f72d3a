"""Which backends run which operations, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from calipers.kernels.operations import REFERENCE, SWITCH, chosen_backends, operations


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
        dtypes, devices = (
            ", ".join(self.dtypes) or "all dtypes",
            ", ".join(self.devices) or "any device",
        )
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
