from __future__ import annotations

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from data import nvfp4

from calipers.errors import ConfigurationError, NoStatisticsError
from calipers.observers import FUSED_LAYER_NAMES, Observer, fuse_weight_observers

NVFP4 = nvfp4(4)


class Block(torch.nn.Module):
    def __init__(self, names: tuple[str, ...], args: QuantizationArgs = NVFP4) -> None:
        super().__init__()
        for size, name in enumerate((*names, "o_proj"), start=1):
            layer = torch.nn.Linear(8, 2)
            layer.weight.data *= 10**size
            layer.weight_observer = Observer.load_from_registry("memoryless_minmax", args=args)
            setattr(self, name, layer)

    def observe(self) -> None:
        for layer in self.children():
            layer.weight_observer(layer.weight)

    def scales(self) -> dict[str, torch.Tensor]:
        return {
            name: layer.weight_observer.get_qparams()["global_scale"]
            for name, layer in self.named_children()
        }


@pytest.mark.parametrize("names", FUSED_LAYER_NAMES)
def test_siblings_share_the_global_scale_of_the_largest(names: tuple[str, ...]) -> None:
    model = torch.nn.ModuleDict({"layer": Block(names)})
    fuse_weight_observers(model)
    block = model["layer"]
    block.observe()
    scales = block.scales()
    weights = [getattr(block, name).weight.detach() for name in names]
    absmax = torch.stack([weight.abs().max() for weight in weights]).max().reshape(1)
    expected = generate_gparam(-absmax, absmax)
    for name, weight in zip(names, weights, strict=True):
        assert torch.equal(scales[name], expected)
        qparams = getattr(block, name).weight_observer.get_qparams()
        low, high = torch.aminmax(weight.view(2, 2, 4), dim=-1)
        assert torch.equal(qparams["scale"], calculate_qparams(low, high, NVFP4, expected)[0])
    assert not torch.equal(scales["o_proj"], expected)


def test_those_without_statistics_are_named() -> None:
    model = torch.nn.ModuleDict({"attn": Block(("q_proj", "k_proj", "v_proj"))})
    fuse_weight_observers(model)
    observer = model["attn"].q_proj.weight_observer(model["attn"].q_proj.weight)
    with pytest.raises(NoStatisticsError) as caught:
        observer.get_qparams()
    assert str(caught.value) == (
        "Observer 'memoryless_minmax' (weight of attn.q_proj) shares its global_scale with "
        "observers that have no statistics: Observer 'memoryless_minmax' (weight of attn.k_proj), "
        "Observer 'memoryless_minmax' (weight of attn.v_proj). "
        "Call each of them on its tensor before get_qparams() on any."
    )
    assert isinstance(caught.value, AssertionError)


def test_incomplete_groups_and_other_strategies_are_left_alone() -> None:
    incomplete = Block(("q_proj", "k_proj", "v_proj"))
    del incomplete.v_proj.weight_observer
    missing = Block(("q_a_proj", "kv_a_proj_with_mqa"))
    missing.q_a_proj = None
    grouped = Block(("gate_proj", "up_proj"), QuantizationArgs(num_bits=4, group_size=4))
    for block in (incomplete, missing, grouped):
        fuse_weight_observers(block)
        observers = [m for m in block.modules() if isinstance(m, Observer)]
        assert observers
        assert all(not observer._fused_observers for observer in observers)


def test_fuse_by_hand_and_in_a_copy() -> None:
    small, large = (Observer.load_from_registry("static_minmax", args=NVFP4) for _ in range(2))
    Observer.fuse([small, large])
    small(torch.ones(1, 4)), large(torch.full((1, 4), 100.0))
    assert small.get_qparams()["global_scale"] == large.get_qparams()["global_scale"]
    pair = copy.deepcopy([small, large])
    pair[1](torch.full((1, 4), 1000.0))
    assert pair[0].get_qparams()["global_scale"] < small.get_qparams()["global_scale"]


def test_a_replaced_observer_leaves_its_group() -> None:
    block = Block(("gate_proj", "up_proj"))
    fuse_weight_observers(block)
    block.gate_proj.weight_observer(torch.full((2, 8), 1000.0))
    block.gate_proj.weight_observer = Observer.load_from_registry("memoryless_minmax", args=NVFP4)
    fuse_weight_observers(block)
    block.observe()
    scales = block.scales()
    assert torch.equal(scales["gate_proj"], scales["up_proj"])
    absmax = max(block.gate_proj.weight.abs().max(), block.up_proj.weight.abs().max())
    assert scales["up_proj"].item() == pytest.approx(448 * 6 / absmax.item(), rel=1e-6)


def test_groups_that_overlap_become_one() -> None:
    a, b, c = (Observer.load_from_registry("static_minmax", args=NVFP4) for _ in range(3))
    Observer.fuse([a, b])
    Observer.fuse([b, c])
    for size, observer in zip((1.0, 10.0, 100.0), (a, b, c), strict=True):
        observer(torch.full((1, 4), size))
    assert len({o.get_qparams()["global_scale"].item() for o in (a, b, c)}) == 1


def test_the_first_generation_cannot_share() -> None:
    class Old(Observer):
        def calculate_qparams(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return observed.amax().reshape(1), torch.zeros(1)

    pair = [Old("weight", NVFP4)(torch.ones(1, 4)) for _ in range(2)]
    assert pair[0].get_qparams()["scale"].shape == (1, 1)
    Observer.fuse(pair)
    with pytest.raises(ConfigurationError, match="works out its scale alone"):
        pair[0].get_qparams()


def test_reading_is_pure_for_the_whole_group() -> None:
    block = Block(("gate_proj", "up_proj"))
    fuse_weight_observers(block)
    block.observe()
    first, again = block.scales(), block.scales()
    assert all(torch.equal(first[name], again[name]) for name in first)
