"""Measuring together gives every statistic what it would have found alone."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calipers.calibration.sharing import SharedInputs
from calipers.errors import ModelRunError
from calipers.observers import Observer
from calipers.statistics.sums import SquareSums
from calipers.statistics.tensor_statistics import TensorStatistics
from calipers.statistics.value_counts import ValueCounts

ARGS = QuantizationArgs(num_bits=8, strategy="tensor")
OBSERVERS = ("static_minmax", "minmax", "histogram_mse")
SUMS, TOGETHER = "square sums", "counts and square sums"


@dataclass(eq=False)
class Diary:
    """A statistic that remembers everything, in order."""

    measures_roundings: ClassVar[bool] = True
    kind: str = "diary"
    name: str = "diary"
    known: list[float] = field(default_factory=list)
    measured: int = 0

    def configuration(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def label(self) -> str:
        return self.name

    def origin(self) -> tuple[()]:
        return ()

    def update(self, tensor: Tensor, mask: Tensor | None) -> None:
        kept = tensor if mask is None else tensor[mask]
        self.known.append(float(kept.sum()))
        self.measured += 1

    def copy_from(self, other: Any) -> None:
        self.known = list(other.known)


def make(kind: str) -> Any:
    """A statistic of a kind."""
    if kind == SUMS:
        return SquareSums()
    if kind == TOGETHER:
        return TensorStatistics([ValueCounts(), SquareSums()])
    if kind in OBSERVERS:
        return Observer.load_from_registry(kind, base_name="input", args=ARGS)
    return Diary(kind)


def knowledge(owner: Any) -> Any:
    if isinstance(owner, Diary):
        return owner.known
    if isinstance(owner, TensorStatistics):
        owner.flush()
        return [knowledge(each) for each in owner.statistics]
    return {name: (value.dtype, value.tolist()) for name, value in owner.fields().items()}


KINDS = st.sampled_from([*OBSERVERS, SUMS, TOGETHER, "diary", "other diary"])
READS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=9)
BATCHES = st.lists(st.tuples(READS, st.booleans()), min_size=1, max_size=4)


@settings(max_examples=100)
@given(st.lists(KINDS, min_size=1, max_size=2), BATCHES, st.booleans())
def test_all_know_what_they_would_know_alone(
    kinds: list[str], batches: list[tuple[list[tuple[int, int]], bool]], masked: bool
) -> None:
    """Tensors 0 and 1 are new in each batch, tensor 2 is the same in all of them."""
    torch.manual_seed(len(batches))
    kinds = [kinds[reader % len(kinds)] for reader in range(5)]
    together, alone = [make(kind) for kind in kinds], [make(kind) for kind in kinds]
    sharing, constant = SharedInputs(), torch.randn(2, 3, 4)
    for reads, finishes in batches:
        tensors = [torch.randn(2, 3, 4), torch.randn(2, 3, 4), constant]
        mask = torch.rand(2, 3) < 0.7 if masked else None
        for who, what in reads:
            sharing.show(together[who], tensors[what], mask)
            alone[who].update(tensors[what], mask)
        sharing.finish() if finishes else sharing.settle()
    sharing.finish()
    for shared, separate in zip(together, alone, strict=True):
        assert knowledge(shared) == knowledge(separate)


def test_three_readers_of_one_tensor_measure_once() -> None:
    sharing, diaries = SharedInputs(), [Diary(), Diary(), Diary()]
    expected = []
    for _ in range(4):
        tensor = torch.randn(5)
        expected.append(float(tensor.sum()))
        for diary in diaries:
            sharing.show(diary, tensor, None)
        sharing.settle()
    sharing.finish()
    assert [diary.known for diary in diaries] == [expected] * 3
    assert [diary.measured for diary in diaries] == [4, 0, 0]


def test_readers_of_other_keys_measure_themselves() -> None:
    sharing, diaries, tensor = SharedInputs(), [Diary("a"), Diary("b")], torch.ones(2)
    for diary in diaries:
        sharing.show(diary, tensor, None)
    sharing.finish()
    assert [(diary.known, diary.measured) for diary in diaries] == [([2.0], 1)] * 2


def test_observers_of_other_settings_measure_themselves() -> None:
    sharing = SharedInputs()
    observers = [
        Observer.load_from_registry("minmax", base_name="input", args=ARGS, averaging_constant=c)
        for c in (0.5, 0.25)
    ]
    for value in (0.0, 8.0):
        tensor = torch.full((1, 4), value)
        for observer in observers:
            sharing.show(observer, tensor, None)
    sharing.finish()
    assert [float(observer.max_vals) for observer in observers] == [4, 2]


def test_those_who_part_measure_for_themselves_from_then_on() -> None:
    sharing, first, second = SharedInputs(), Diary(), Diary()
    common, own = torch.full((1,), 1.0), torch.full((1,), 10.0)
    for diary in (first, second):
        sharing.show(diary, common, None)
    sharing.show(first, own, None)
    sharing.settle()
    later = torch.full((1,), 100.0)
    for diary in (first, second):
        sharing.show(diary, later, None)
    sharing.finish()
    assert (first.known, second.known) == ([1.0, 10.0, 100.0], [1.0, 100.0])
    assert (first.measured, second.measured) == (3, 1)


def test_a_tensor_changed_while_readers_wait_is_refused() -> None:
    sharing, first, second = SharedInputs(), Diary(name="q_proj"), Diary(name="k_proj")
    tensor = torch.ones(1)
    for diary in (first, second):
        sharing.show(diary, tensor, None)
    tensor = torch.ones(1)
    sharing.show(first, tensor, None)
    tensor.add_(1)
    message = (
        "q_proj reads a tensor that other modules read too, and that one of them changes in place "
        "before all have read it: it cannot be measured once for all. Pass share_inputs=False to "
        "measure it for each of them."
    )
    with pytest.raises(ModelRunError, match=f"^{re.escape(message)}$"):
        sharing.settle()


def test_a_tensor_changed_after_it_was_measured_is_another_one() -> None:
    sharing, first, second, tensor = SharedInputs(), Diary(), Diary(), torch.ones(1)
    sharing.show(first, tensor, None)
    tensor.add_(1)
    sharing.show(second, tensor, None)
    sharing.finish()
    assert (first.known, second.known) == ([1.0], [2.0])


def test_the_same_tensor_under_another_mask_is_measured_again() -> None:
    """A tensor that does not depend on the batch: its tokens count differently in each."""
    sharing, first, second, tensor = SharedInputs(), Diary(), Diary(), torch.tensor([1.0, 10.0])
    sharing.show(first, tensor, torch.tensor([True, False]))
    sharing.settle()
    sharing.show(second, tensor, torch.tensor([False, True]))
    sharing.finish()
    assert (first.known, second.known) == ([1.0], [10.0])


def test_what_was_known_before_finishing_stays_known() -> None:
    sharing, first, second = SharedInputs(), Diary(), Diary()
    sharing.show(first, torch.full((1,), 1.0), None)
    sharing.show(second, torch.full((1,), 2.0), None)
    sharing.finish()
    tensor = torch.full((1,), 10.0)
    sharing.show(first, tensor, None)
    sharing.show(second, tensor, None)
    sharing.finish()
    assert (first.known, second.known) == ([1.0, 10.0], [2.0, 10.0])


def test_inference_tensors_are_shared_too() -> None:
    sharing, diaries = SharedInputs(), [Diary(), Diary()]
    with torch.inference_mode():
        for _ in range(2):
            tensor = torch.ones(3)
            for diary in diaries:
                sharing.show(diary, tensor, None)
    sharing.finish()
    assert [diary.known for diary in diaries] == [[3.0, 3.0]] * 2
    assert [diary.measured for diary in diaries] == [2, 0]


@pytest.mark.parametrize("readers_of_the_last", [1, 2, 3])
def test_no_tensor_is_kept_after_settling(readers_of_the_last: int) -> None:
    sharing, diaries = SharedInputs(), [Diary(), Diary(), Diary()]
    alive = []
    for count in (3, 3, readers_of_the_last):
        tensor, mask = torch.randn(5), torch.ones(5, dtype=torch.bool)
        alive += [weakref.ref(tensor), weakref.ref(mask)]
        for diary in diaries[:count]:
            sharing.show(diary, tensor, mask)
    sharing.settle()
    del tensor, mask
    gc.collect()
    assert [each() for each in alive] == [None] * 6
