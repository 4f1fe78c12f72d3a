"""Where the scale of a channel can be moved from one module to another without any change.

A factor per channel is taken out of a norm, or out of the rows of a Linear, and put into the
columns of all that read it. Whether a module hands such a factor on is tried with numbers; which
modules read which is told by names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from calipers.topology.experts import Expert, StackedForm, UnfusedExperts, fused_experts
from calipers.topology.model import Topology, declared_ties
from calipers.topology.names import expert_of

_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense")
# What may stand beside values in an attention module whose output is their weighted mean.
_BESIDE_VALUES = frozenset(
    ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "rotary_emb")
)


@dataclass(frozen=True)
class Fold:
    """A module whose output channels can be divided, and those that are multiplied in return.

    :param source: a norm, or a Linear
    :param readers: all modules that read its output
    :param kind: ``norm``; ``values``, for values of attention; ``up``, for what a gate multiplies
    :param offset: what a norm adds to its weight before it multiplies with it
    :param channels: how many factors there are
    :param head_dim: channels of a head of the source
    :param repeats: how many heads of the readers read the same head of the source
    """

    source: str
    readers: tuple[str, ...]
    kind: Literal["norm", "values", "up"]
    channels: int
    offset: float = 0.0
    head_dim: int = 1
    repeats: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """All modules that are changed."""
        return (self.source, *self.readers)

    def expanded(self, factors: Tensor) -> Tensor:
        """Return the factors of the channels that readers see."""
        heads = factors.reshape(-1, 1, self.head_dim)
        return heads.expand(-1, self.repeats, -1).reshape(-1)

    def by_channel(self, values: Tensor) -> Tensor:
        """Return values of the channels that readers see by factor: (channels, repeats)."""
        heads = values.reshape(-1, self.repeats, self.head_dim)
        return heads.transpose(1, 2).reshape(self.channels, self.repeats)


@dataclass(frozen=True)
class Folds:
    """What can be folded in a model, and why the rest cannot.

    :param obstacles: module whose output cannot be divided → why
    """

    found: tuple[Fold, ...]
    obstacles: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Folds:
        """Find them, in the order of the model; values of weights are not looked at."""
        modules = dict(model.named_modules())
        order = {name: index for index, name in enumerate(modules)}
        shared = _shared_modules(model)
        found, obstacles = list[Fold](), dict[str, str]()
        candidates = (*_norms(model, modules), *_values(model, modules), *_ups(modules))
        for source, fold in candidates:
            if isinstance(fold, str):
                obstacles[source] = fold
                continue
            common = [name for name in fold.names if name in shared]
            if common:
                obstacles[source] = f"'{common[0]}' shares its weight with {shared[common[0]]}"
            else:
                found.append(fold)
        # Norms first: the columns of values and ups are settled before their rows are.
        found.sort(key=lambda fold: (fold.kind != "norm", order[fold.source]))
        return cls(tuple(found), obstacles)


def _shared_modules(model: nn.Module) -> dict[str, str]:
    """Return the modules whose weights occur under several names, each with another name."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        other = first.setdefault(id(tensor), owner)
        if other != owner:
            shared |= {owner: f"'{other}'", other: f"'{owner}'"}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for copy, source in declared_ties(model, names):
        if _is_tied(model, copy, source):
            one, other = (each.rpartition(".")[0] for each in (copy, source))
            shared |= {one: f"'{other}'", other: f"'{one}'"}
    return shared


def _is_tied(model: nn.Module, copy: str, source: str) -> bool:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    one, other = tensors.get(copy), tensors.get(source)
    return one is not None and one is other


Candidate = tuple[str, Fold | str]
"""A module whose output might be divided, with the fold or with why there is none."""


def _norms(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Candidate]:
    """Go through the norms that are read by matrices alone."""
    readers: dict[str, list[str]] = {}
    for reader, norm in Topology.of(model).norms.items():
        readers.setdefault(norm, []).append(reader)
    config: Any = getattr(model, "config", None)
    # BLOOM may add what the norm returns to the residual stream.
    is_added = bool(getattr(config, "apply_residual_connection_post_layernorm", False))
    stacked = fused_experts(model)
    for norm, names in readers.items():
        own: Any = modules[norm]
        offset = norm_offset(own)
        problem = "its output is added to the residual stream, too" if is_added else None
        if offset is None:
            problem = f"{type(own).__name__} does not multiply by its weight, nor by 1 + weight"
        for name in names:
            weight: Any = getattr(modules[name], "weight", None)
            if getattr(weight, "ndim", 0) != 2 and not _is_known_stack(name, stacked):
                what = f"'{name}' reads it, a {type(modules[name]).__name__}"
                problem = f"{what} without a matrix of its own"
        if problem is not None:
            yield norm, problem
        else:
            assert offset is not None
            yield norm, Fold(norm, tuple(names), "norm", len(own.weight), offset)


def _is_known_stack(name: str, stacked: Mapping[str, nn.Module]) -> bool:
    if name not in stacked:
        return False
    try:
        StackedForm.of(stacked[name], name)
    except Exception:  # whatever it is, it is left alone
        return False
    return True


@contextmanager
def _in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with other tensors, which are found before its parameters."""
    try:
        vars(module).update(tensors)
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


@torch.no_grad()
def norm_offset(norm: nn.Module) -> float | None:
    """Return what a norm adds to its weight, found by trying: 0, or 1 as in Gemma; None: unknown.

    >>> norm_offset(nn.LayerNorm(4)), norm_offset(nn.Dropout())
    (0.0, None)
    """
    weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.ndim != 1 or norm._parameters.keys() > {"weight", "bias"}:
        return None
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[0]
    x, gain = (torch.rand(3, width, generator=generator) + 0.5 for _ in range(2))
    given = {} if bias is None else {"bias": torch.zeros(width)}

    def out(of: Tensor) -> Tensor:
        with _in_place(norm, {"weight": of, **given}):
            result: Tensor = type(norm).forward(norm, x)
        return result

    try:
        at_zero, at_one = out(torch.zeros(width)), out(torch.ones(width))
        offset = 0.0 if not bool(at_zero.any()) else 1.0
        expected = (at_one - at_zero) * (gain[0] + offset)
        is_as_expected = torch.allclose(out(gain[0]), expected, rtol=1e-4, atol=1e-5)
    except Exception:  # a norm of another kind
        return None
    return offset if is_as_expected and bool(at_one.any()) else None


def _values(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Candidate]:
    """Go through the values of attention: their weighted means are what its last Linear reads."""
    config: Any = getattr(model, "config", None)
    for name, value in modules.items():
        parent, _, own = name.rpartition(".")
        if own != "v_proj" or not isinstance(value, nn.Linear):
            continue
        attention: Any = modules[parent]
        children = dict(attention.named_children())
        outputs = [each for each in _ATTENTION_OUTPUTS if each in children]
        unknown = children.keys() - _BESIDE_VALUES - {*outputs}
        unknown = {each for each in unknown if any(True for _ in children[each].parameters())}
        if len(outputs) != 1 or unknown:
            what = f" beside {', '.join(sorted(unknown))}" if unknown else ""
            yield name, f"what reads the values of {type(attention).__name__} is not known{what}"
            continue
        if getattr(config, "clip_qkv", None) is not None:
            yield name, "values are clipped (clip_qkv)"
            continue
        reader = children[outputs[0]]
        rows, columns = value.out_features, reader.in_features
        head_dim = int(getattr(attention, "head_dim", None) or 0)
        repeats = columns // rows
        if columns % rows or (repeats > 1 and (not head_dim or rows % head_dim)):
            yield name, f"its {rows} rows are not heads that the {columns} columns behind repeat"
            continue
        head = head_dim if repeats > 1 else rows
        yield name, Fold(name, (f"{parent}.{outputs[0]}",), "values", rows, 0.0, head, repeats)


def _ups(modules: Mapping[str, nn.Module]) -> Iterator[Candidate]:
    """Go through the projections whose results a gate multiplies, on the way to the next Linear."""
    for name, block in modules.items():
        for gate, up, down in _GATED:
            parts: list[Any] = [getattr(block, part, None) for part in (gate, up, down)]
            if not all(isinstance(part, nn.Linear) for part in parts):
                if isinstance(parts[1], nn.Linear) and isinstance(parts[2], nn.Linear):
                    problem = "no gate multiplies it: an activation lies between it and its reader"
                    yield f"{name}.{up}", problem
                continue
            rows = parts[1].out_features
            if rows == parts[2].in_features and _is_linear_between(modules, name, (gate, up, down)):
                yield f"{name}.{up}", Fold(f"{name}.{up}", (f"{name}.{down}",), "up", rows)
            else:
                problem = f"{type(block).__name__} does more than multiply it by a gate"
                yield f"{name}.{up}", problem


@torch.no_grad()
def _is_linear_between(
    modules: Mapping[str, nn.Module], name: str, parts: tuple[str, str, str]
) -> bool:
    """Whether what one Linear of a block returns reaches another, each channel times a number."""
    block: Any = modules[name]
    gate, up, down = (getattr(block, part) for part in parts)
    generator = torch.Generator().manual_seed(0)
    gates, ups, factors = (torch.randn(2, up.out_features, generator=generator) for _ in range(3))

    def between(of: Tensor) -> Tensor:
        if isinstance(block, Expert):
            expert = expert_of(name)
            assert expert is not None
            experts = modules[expert.experts]
            assert isinstance(experts, UnfusedExperts)
            return experts._activate(gates, of)
        with ExitStack() as stack:
            for module, result in ((gate, gates), (up, of)):
                stack.enter_context(_forward_of(module, lambda *_, result=result: result))
            stack.enter_context(_forward_of(down, lambda x: x))
            output: Any = type(block).forward(block, torch.zeros(2, gate.in_features))
        assert isinstance(output, Tensor)
        return output

    try:
        scaled, plain = between(ups * factors), between(ups) * factors
        return scaled.shape == plain.shape and torch.allclose(scaled, plain, rtol=1e-4, atol=1e-5)
    except Exception:  # a block that runs in another way
        return False


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        if own is not None:
            vars(module)["forward"] = own
