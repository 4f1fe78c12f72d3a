"""The contract of every observer. A new one joins by a line in ``PROMISES``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import NotMergeableError
from calipers.observers import Observer


@dataclass(frozen=True)
class Promise:
    """What an observer promises about the order and the cutting of its data."""

    merges: bool = False
    ignores_order: bool = False
    strategies: tuple[str, ...] | None = None  # None for all
    base_names: tuple[str, ...] | None = None
    bits: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # what makes the laws quick to check

    def suits(self, args: QuantizationArgs) -> bool:
        """Whether the observer is made for such arguments."""
        strategies = self.strategies or (args.strategy,)
        return args.strategy in strategies and args.num_bits == (self.bits or args.num_bits)


COUNTED: dict[str, Any] = {
    "merges": True,
    "ignores_order": True,
    "strategies": ("tensor", "attn_head"),
}

PROMISES = {
    "entropy": Promise(**COUNTED, bits=8, options={"bins": 320}),
    "histogram_mse": Promise(**COUNTED),
    "imatrix_mse": Promise(),
    "memoryless_minmax": Promise(),
    "memoryless_mse": Promise(),
    "minmax": Promise(),
    "mse": Promise(),
    "nvfp4_expanded_imatrix": Promise(),
    "nvfp4_expanded_mse": Promise(),
    "optimal": Promise(base_names=("weight",)),
    "percentile": Promise(**COUNTED, options={"percentile": 95}),
    "static_minmax": Promise(merges=True, ignores_order=True),
    "value_counts": Promise(**COUNTED),
}

FOR_INPUTS = [n for n, p in PROMISES.items() if p.base_names is None or "input" in p.base_names]

Stream = Sequence[Tensor]
Law = Callable[[str, str, QuantizationArgs, Stream], None]


def build(name: str, base_name: str, args: QuantizationArgs, stream: Stream = ()) -> Observer:
    """Return an observer that has seen a stream."""
    options = PROMISES[name].options
    observer = Observer.load_from_registry(name, base_name=base_name, args=args, **options)
    for tensor in stream:
        observer(tensor)
    return observer


def assert_same(a: Observer, b: Observer) -> None:
    """Assert that two observers know and answer the same, to the bit."""
    ours, theirs = a.fields(), b.fields()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=False)
    assert a.num_observed_tokens == b.num_observed_tokens
    if a.has_statistics:
        for ours_q, theirs_q in zip(
            a.get_qparams().values(), b.get_qparams().values(), strict=True
        ):
            if ours_q is not None or theirs_q is not None:
                assert isinstance(ours_q, Tensor)
                assert isinstance(theirs_q, Tensor)
                assert ours_q.dtype == theirs_q.dtype
                assert torch.equal(ours_q.float(), theirs_q.float())


def merge_equals_replay(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """Merging equals having seen both streams; an observer that cannot do that refuses."""
    half = max(1, len(stream) // 2)
    first, second = build(name, base_name, args, stream[:half]), stream[half:]
    other = build(name, base_name, args, second)
    before = {k: v.clone() for k, v in other.fields().items()}
    if PROMISES[name].merges or not second:
        assert_same(first.merge(other), build(name, base_name, args, stream))
    else:
        with pytest.raises(NotMergeableError):
            first.merge(other)
        assert_same(first, build(name, base_name, args, stream[:half]))
    assert before.keys() == other.fields().keys()
    for key, value in before.items():
        assert torch.equal(value, other.fields()[key])


def nothing_is_shared(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """What is done to a tensor after it was observed, merged or loaded changes no statistic."""
    expected = build(name, base_name, args, stream)
    observed = [tensor.clone() for tensor in stream]
    source = build(name, base_name, args, observed)
    merged = build(name, base_name, args).merge(source)
    loaded = build(name, base_name, args)
    saved = {key: value.clone() for key, value in source.state_dict().items()}
    loaded.load_state_dict(saved)
    for tensor in (*observed, *saved.values()):
        tensor.fill_(9)
    assert_same(source, expected)
    for tensor in source.fields().values():
        tensor.fill_(9)
    assert_same(merged, expected)
    assert_same(loaded, expected)


def merging_with_nothing_changes_nothing(
    name: str, base_name: str, args: QuantizationArgs, stream: Stream
) -> None:
    """An observer that has seen nothing is neutral on either side."""
    seen = build(name, base_name, args, stream)
    assert_same(build(name, base_name, args, stream).merge(build(name, base_name, args)), seen)
    assert_same(build(name, base_name, args).merge(seen), seen)


def reset_forgets(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """After a reset nothing is left of what was seen."""
    observer = build(name, base_name, args, [-tensor * 3 for tensor in stream])
    observer.reset()
    assert not observer.has_statistics
    assert not observer.fields()
    assert observer.num_observed_tokens == 0
    for tensor in stream:
        observer(tensor)
    assert_same(observer, build(name, base_name, args, stream))


def state_dict_round_trips(
    name: str, base_name: str, args: QuantizationArgs, stream: Stream
) -> None:
    """A saved observer goes on as if it had never been saved."""
    half = len(stream) // 2
    saved = build(name, base_name, args, stream[:half]).state_dict()
    assert all(isinstance(value, Tensor) for value in saved.values())
    observer = build(name, base_name, args, [tensor * 7 for tensor in stream])
    observer.load_state_dict(saved)
    for tensor in stream[half:]:
        observer(tensor)
    assert_same(observer, build(name, base_name, args, stream))


def reading_changes_nothing(
    name: str, base_name: str, args: QuantizationArgs, stream: Stream
) -> None:
    """Results can be asked for at any time, as often as one likes."""
    observer = build(name, base_name, args)
    for tensor in stream:
        kept = tensor.clone()
        observer(tensor)
        assert torch.equal(kept, tensor)
        observer.get_qparams(), observer.get_statistics(), observer.state_dict(), list(observer)
    assert_same(observer, build(name, base_name, args, stream))


def order_and_batching(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """Where it is promised, neither order nor batch size matters."""
    if not PROMISES[name].ignores_order or base_name == "weight":
        return
    whole = build(name, base_name, args, stream)
    assert_same(build(name, base_name, args, list(reversed(stream))), whole)
    single = [piece for tensor in stream for piece in torch.unbind(tensor[:, None])]
    assert_same(build(name, base_name, args, single), whole)


def moves_keep_precision(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """Casting the model leaves the statistics alone; moving it moves them."""
    observer = build(name, base_name, args, stream)
    kept = build(name, base_name, args, stream)
    model = torch.nn.ModuleDict({"weight_observer": observer})
    model.to(torch.float16)
    assert_same(observer, kept)
    model.double().to("cpu")
    assert_same(observer, kept)
    model.to("meta")
    assert {value.device.type for value in observer.fields().values()} == {"meta"}


def empty_changes_nothing(
    name: str, base_name: str, args: QuantizationArgs, stream: Stream
) -> None:
    """An empty tensor is no observation."""
    observer = build(name, base_name, args)
    empty = stream[0][..., :0]
    assert observer(empty) is observer
    assert not observer.has_statistics
    for tensor in stream:
        observer(tensor)(empty)
    assert_same(observer, build(name, base_name, args, stream))


def args_stay_untouched(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """What the user configured is the user's."""
    before = args.model_dump_json()
    build(name, base_name, args, stream).get_qparams()
    Observer.load_from_registry(name, base_name=base_name, args=args, nonfinite="ignore")
    assert args.model_dump_json() == before


LAWS: tuple[Law, ...] = (
    merge_equals_replay,
    merging_with_nothing_changes_nothing,
    nothing_is_shared,
    reset_forgets,
    state_dict_round_trips,
    reading_changes_nothing,
    order_and_batching,
    moves_keep_precision,
    empty_changes_nothing,
    args_stay_untouched,
)
