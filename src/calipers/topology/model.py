"""The topology of a model, resolved once from its modules, or from their names alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from typing_extensions import Self

from calipers.errors import ConfigurationError
from calipers.topology.layers import decoder_layers, layers_of_names
from calipers.topology.names import expert_of, fused_projections, grouped
from calipers.topology.norms import norms_of_readers
from calipers.topology.ties import shared_parameters


@dataclass(frozen=True)
class Topology:
    """What a model is made of, by the names of its modules.

    :param modules: all modules
    :param layers: the decoder layers, in order
    :param norms: module that reads the output of a norm → that norm
    :param tied: parameter → the one before it that is the same tensor

    >>> topology = Topology.of_names(["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"])
    >>> topology.layer_of("layers.0.q_proj"), topology.fused_with("layers.0.q_proj")
    ('layers.0', ('layers.0.q_proj', 'layers.0.k_proj', 'layers.0.v_proj'))
    """

    modules: tuple[str, ...]
    layers: tuple[str, ...] = ()
    norms: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self:
        """Resolve the topology of a model; one without a stack of layers has no layers."""
        modules = dict(model.named_modules())
        try:
            layers = tuple(decoder_layers(model))
        except ConfigurationError:
            layers = ()
        norms = {
            reader: norm
            for reader, norm in norms_of_readers(modules, layers).items()
            if _fits(modules[reader], modules[norm])
        }
        return cls(tuple(modules), layers, norms, shared_parameters(model))

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Self:
        """Resolve what names of modules tell, as of a checkpoint whose model is not there."""
        modules = tuple(dict.fromkeys(names))
        layers = layers_of_names(modules)
        return cls(modules, layers, norms_of_readers(modules, layers))

    def layer_of(self, name: str) -> str | None:
        """Return the decoder layer that a module is in; None outside of layers."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self._layers), None)

    def fused_with(self, name: str) -> tuple[str, ...]:
        """Return the modules that engines run as one matrix with one, itself among them."""
        return tuple(each for each in fused_projections(name) if each in self._modules)

    def norm_of(self, name: str) -> str | None:
        """Return the norm whose output a module reads; None where it reads something else."""
        return self.norms.get(name)

    def readers_of(self, norm: str) -> tuple[str, ...]:
        """Return the modules that read the output of a norm: Linears, routers, stacked experts."""
        return tuple(reader for reader, its in self.norms.items() if its == norm)

    def shared_inputs(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Group modules that read the same tensor; each expert has tokens of its own."""

        def key(name: str) -> object:
            norm = None if expert_of(name) else self.norm_of(name)
            return fused_projections(name) if norm is None else norm

        return grouped(names, key)

    @property
    def experts(self) -> tuple[str, ...]:
        """The modules whose children are experts."""
        holders = (expert_of(name) for name in self.modules)
        return tuple(dict.fromkeys(expert.experts for expert in holders if expert is not None))

    def expert_siblings(self, name: str) -> tuple[str, ...]:
        """Return the same module of all experts of a layer, itself among them; or nothing."""
        expert = expert_of(name)
        return () if expert is None else self._families[expert.family]

    @cached_property
    def _families(self) -> dict[tuple[str, str], tuple[str, ...]]:
        families: dict[tuple[str, str], list[str]] = {}
        for name in self.modules:
            if expert := expert_of(name):
                families.setdefault(expert.family, []).append(name)
        return {family: tuple(names) for family, names in families.items()}

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(self.modules)

    @cached_property
    def _layers(self) -> frozenset[str]:
        return frozenset(self.layers)


def _fits(reader: torch.nn.Module, norm: torch.nn.Module) -> bool:
    """Whether a norm has weights, as many as a matrix has columns."""
    scale: Any = getattr(norm, "weight", None)
    matrix: Any = getattr(reader, "weight", None)
    if scale is None or scale.ndim != 1:
        return False
    return matrix is None or matrix.shape[-1] == scale.shape[0]
