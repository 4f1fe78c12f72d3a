"""One global scale for tensors that run as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from data import nvfp4
from weights import build, error, layer, least_error, local_scales

from calipers.errors import NoStatisticsError
from calipers.observers import Observer, fuse_weight_observers


class Attention(torch.nn.Module):
    def __init__(self, sizes: tuple[float, ...] = (0.1, 1.0, 3.0), **options: Any) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            linear = layer()
            linear.weight.data *= size
            linear.weight_observer = build(nvfp4(16), **options)
            setattr(self, name, linear)

    def observe(self) -> list[Any]:
        """All of them, before any is asked."""
        for linear in self.children():
            linear.weight_observer(linear.weight)
        return [linear.weight_observer.get_qparams() for linear in self.children()]


class TestFused:
    def test_they_share_the_best_of_their_global_scales(self) -> None:
        block = Attention()
        fuse_weight_observers(block)
        qparams = block.observe()
        shared = qparams[0]["global_scale"]
        assert all(torch.equal(mine["global_scale"], shared) for mine in qparams)
        weights = [linear.weight for linear in block.children()]
        absmax = torch.stack([weight.detach().float().abs().max() for weight in weights]).max()
        usual = (448 * 6 / absmax).reshape(1)
        totals = [
            sum(least_error(weight, nvfp4(16), local_scales(scale)) for weight in weights)
            for scale in (shared, usual)
        ]
        found = sum(
            error(weight, mine, nvfp4(16)) for weight, mine in zip(weights, qparams, strict=True)
        )
        assert found <= totals[0] * (1 + 1e-5)
        assert found <= totals[1] * (1 + 1e-2)  # the usual one may differ by a rounding to bf16

    def test_the_best_of_four_global_scales_is_taken(self) -> None:
        factors = (1.0, 0.875, 0.75, 0.625)
        taken = set()
        for seed in range(8):
            weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
            usual = (448 * 6 / weight.abs().max()).reshape(1)
            chosen = float(build(nvfp4(16))(weight).get_qparams()["global_scale"] / usual)
            errors = [least_error(weight, nvfp4(16), local_scales(usual * f)) for f in factors]
            nearest = min(range(4), key=lambda i: abs(factors[i] - chosen))
            assert chosen == pytest.approx(factors[nearest], rel=1e-5)
            assert errors[nearest] <= min(errors) * (1 + 1e-5)
            taken.add(factors[nearest])
        assert taken == set(factors)  # so many seeds that each is the best once

    def test_with_one_of_another_kind_the_usual_one_is_shared(self) -> None:
        block = Attention()
        block.k_proj.weight_observer = Observer.load_from_registry(
            "memoryless_minmax", base_name="weight", args=nvfp4(16)
        )
        fuse_weight_observers(block)
        scales = {float(qparams["global_scale"]) for qparams in block.observe()}
        assert len(scales) == 1

    def test_after_observing(self) -> None:
        before = Attention()
        after = copy.deepcopy(before)
        fuse_weight_observers(before)
        expected = before.observe()
        after.observe()
        fuse_weight_observers(after)
        for linear, theirs in zip(after.children(), expected, strict=True):
            ours = linear.weight_observer.get_qparams()
            assert torch.equal(ours["global_scale"], theirs["global_scale"])
            assert torch.equal(ours["scale"].float(), theirs["scale"].float())

    def test_loaded_from_a_state_the_weight_is_missing(self) -> None:
        block = Attention()
        block.observe()
        saved = block.state_dict()
        loaded = Attention()
        loaded.load_state_dict(saved)
        fuse_weight_observers(loaded)
        with pytest.raises(NoStatisticsError) as caught:
            loaded.q_proj.weight_observer.get_qparams()
        assert str(caught.value) == (
            "Observer 'optimal' (weight of q_proj) no longer has the weight it observed, which a "
            "report and a global scale shared with fused observers need. "
            "Call observer(weight) again."
        )
        loaded.observe()
        fuse_weight_observers(block)
        block.observe()
        ours, theirs = (b.q_proj.weight_observer.get_qparams() for b in (loaded, block))
        assert torch.equal(ours["scale"].float(), theirs["scale"].float())
