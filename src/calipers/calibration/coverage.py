"""How much each module has seen, and what becomes of those that saw nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from calipers.errors import counted, shortened
from calipers.notebook import NotebookView
from calipers.topology.names import expert_of

UnseenPolicy = Literal["error", "weights_only", "peers"]

SCARCE = 0.1
"""An expert that sees less than this part of its even share is reported."""


@dataclass
class Coverage(NotebookView):
    """Tokens seen by each module that needs data.

    :param tokens: module → tokens
    :param policy: what was to be done about modules that saw none
    :param applied: modules the policy was applied to → what was done
    """

    policy: UnseenPolicy = "error"
    tokens: dict[str, int] = field(default_factory=dict)
    applied: dict[str, str] = field(default_factory=dict)

    @property
    def unseen(self) -> list[str]:
        """Modules that saw no token."""
        return [name for name, count in self.tokens.items() if not count]

    @property
    def scarce(self) -> dict[str, float]:
        """Experts that saw some, but less than a tenth of an even share → their part of it."""
        shares: dict[str, float] = {}
        for names in self._families().values():
            even = sum(self.tokens[name] for name in names) / len(names)
            shares |= {name: self.tokens[name] / even for name in names if self.tokens[name]}
        return {name: share for name, share in shares.items() if share < SCARCE}

    def siblings(self, name: str) -> list[str]:
        """Return the experts beside one that have seen something."""
        expert = expert_of(name)
        names = self._families()[expert.family] if expert else []
        return [other for other in names if other != name and self.tokens[other]]

    def _families(self) -> dict[tuple[str, str], list[str]]:
        families: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self.tokens:
            if expert := expert_of(name):
                families[expert.family].append(name)
        return families

    def __repr__(self) -> str:
        if not self.tokens:
            return "Coverage(no module needed data)"
        least, most = min(self.tokens.values()), max(self.tokens.values())
        amount = f"{least:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
        found = {"unseen": len(self.unseen), "scarce": len(self.scarce)}
        parts = [f"{number} {what}" for what, number in found.items() if number]
        return f"Coverage({', '.join([counted(len(self.tokens), 'module'), amount, *parts])})"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "on_unseen": self.policy,
            "tokens": self.tokens,
            "unseen": self.unseen,
            "scarce_experts": self.scarce,
            "applied": self.applied,
        }

    def sentences(self) -> list[str]:
        """Say what a user must know: who saw nothing, and who saw little."""
        said = []
        if self.unseen:
            done = {self.applied.get(name, "nothing done") for name in self.unseen}
            said.append(
                f"{counted(len(self.unseen), 'module')} saw no tokens ({'; '.join(sorted(done))}): "
                f"{shortened(self.unseen)}."
            )
        if self.scarce:
            said.append(
                f"{counted(len(self.scarce), 'module')} of experts saw less than {SCARCE:.0%} of "
                f"an even share: {shortened(self.scarce)}. Give more data."
            )
        return said
