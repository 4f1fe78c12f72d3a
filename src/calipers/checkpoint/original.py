"""The float model that a quantized checkpoint was made from, read from its files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.reader import load_skeleton
from calipers.checkpoint.state import offloaded_tensors, tied_names
from calipers.checkpoint.stored_weights import StoredWeights
from calipers.checkpoint.unknown_model import unknown_model
from calipers.errors import ConfigurationError, cannot_load, damaged_file
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor


@dataclass(frozen=True)
class OriginalModel:
    """A float model in its files; opening it reads headers alone.

    :param tensors: by their names on disk
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    trust_remote_code: bool = False

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, trust_remote_code: bool = False
    ) -> OriginalModel:
        """Open a folder; refuse one that holds no model, or a quantized one."""
        folder = Path(path)
        check_location(str(folder))
        if not folder.is_dir():
            raise cannot_load(str(folder), "there is no such folder")
        if read_json_object(folder / "config.json").get("quantization_config") is not None:
            raise ConfigurationError(
                "is quantized itself: its config has a quantization_config",
                subject=f"The model '{folder}'",
                hint="Give the model that the checkpoint was made from.",
            )
        tensors = stored_tensors(folder)
        if not tensors:
            raise cannot_load(str(folder), "there are no safetensors in it")
        return cls(folder, tensors, trust_remote_code)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return Path(os.path.realpath(self.folder)).name

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def weight(self, module: str) -> StoredTensor | None:
        """Return the weight of a module; a head that has none of its own is the embedding."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None and module.endswith("lm_head"):
            names = (n for n in self.tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
            weight = next((self.tensors[name] for name in names), None)
        return weight

    @cached_property
    def fingerprint(self) -> str:
        """By what measurements know the model."""
        folder = self.folder
        trusted = self.trust_remote_code
        model = unknown_model(folder) or load_skeleton(folder, trust_remote_code=trusted)
        own_names = offloaded_tensors(model)
        weights = StoredWeights.of(model, self.tensors, tied_names(model), own_names)
        if weights is None:
            problem = "it does not hold its weights in safetensors as the model has them"
            raise damaged_file(folder, problem)
        return weights.fingerprint()
