"""A statistic inside a model: saved, loaded and moved with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from calipers.errors import ConfigurationMismatchError
from calipers.statistics.base import Statistic
from calipers.statistics.guarding import guarded


class StatisticModule(Statistic, torch.nn.Module):
    """A module whose state are the fields of a statistic.

    A state_dict holds the fields that have data and the configuration they were gathered under,
    all of it as tensors. Casting the model leaves the precision of its statistics alone.
    A field may be saved in another form than it is kept in: see ``packed`` and ``unpacked``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name in self.declared():
            self.__dict__.setdefault("_none_at_first", set()).add(name)
        super().__setattr__(name, value)

    @guarded
    def reset(self) -> None:
        """Forget everything; fields that a subclass began as None are None again."""
        super().reset()
        for name in self.__dict__.get("_none_at_first", ()):
            setattr(self, name, None)

    def packed(self, name: str, value: Tensor) -> Tensor:  # noqa: ARG002
        """Return the form in which a field is saved."""
        return value

    def unpacked(self, name: str, saved: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return a saved field in the form it is kept in, where it had this shape."""
        return saved

    @guarded
    def get_extra_state(self) -> Tensor:
        """Return the configuration and the shapes of the fields as bytes of JSON."""
        shapes = {name: list(value.shape) for name, value in self.fields().items()}
        text = json.dumps({"configuration": self.configuration(), "fields": shapes})
        return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse fields that were gathered under another configuration."""
        saved = _read(state)["configuration"]
        if saved != self.configuration():
            action = f"load a state into {self.label()}"
            raise ConfigurationMismatchError(action, self.configuration(), saved)

    @guarded
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.fields().items():
            destination[prefix + name] = self.packed(name, value)

    @guarded
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if prefix and not any(key.startswith(prefix) for key in state_dict):
            return  # a checkpoint of the model alone says nothing about its statistics
        saved = {
            name: state_dict[prefix + name]
            for name in self.declared()
            if prefix + name in state_dict
        }
        rest = {key: v for key, v in state_dict.items() if key.removeprefix(prefix) not in saved}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        described = _read(state_dict.get(f"{prefix}_extra_state"))["fields"]
        saved = {
            name: self.unpacked(name, value, described.get(name, value.shape))
            for name, value in saved.items()
        }
        missing = [prefix + name for name in described if name not in saved]
        wrong = [
            f"{prefix}{name} was saved with shape {described[name]}."
            for name, value in saved.items()
            if list(value.shape) != described.get(name, list(value.shape))
        ]
        missing_keys.extend(missing)
        error_msgs.extend(wrong)
        if not missing and not wrong:
            self.load_fields(saved)

    @guarded
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        fields = list(self.fields().values())
        if fields:
            self.move(fn(fields[0].new_empty(0)).device)
        return self


def _read(state: Tensor | None) -> dict[str, Any]:
    if state is None:
        return {"configuration": {}, "fields": {}}
    described: dict[str, Any] = json.loads(bytes(state.cpu().tolist()).decode())
    return described
