"""The contracts of observers and statistics.

A new observer joins by a line in ``PROMISES``, a new statistic by one in ``STATISTICS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import MergeError
from calipers.observers import Observer
from calipers.observers.spec import ObserverSpec, Weight, solve_weights
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema, LastRange, MovingAverage
from calipers.statistics.sums import BlockHessians, PairedHessians, SquareSums, TokenSquares
from calipers.statistics.value_counts import ValueCounts


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
        with pytest.raises(MergeError, match="depends on the order of the data"):
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


def copies_know_the_same(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """Who takes over what another one knows goes on from there; the other one stays."""
    half = len(stream) // 2
    original = build(name, base_name, args, stream[:half])
    copied = build(name, base_name, args, [tensor * 7 for tensor in stream])
    copied.copy_from(original)
    for tensor in stream[half:]:
        copied.update(tensor)
    assert_same(copied, build(name, base_name, args, stream))
    assert_same(original, build(name, base_name, args, stream[:half]))


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


def parts_say_the_same(name: str, base_name: str, args: QuantizationArgs, stream: Stream) -> None:
    """The statistics and solvers that an engine uses find what the observer finds, to the bit."""
    chosen = {"observer": name, "observer_kwargs": PROMISES[name].options}
    resolve = ObserverSpec.resolve
    spec = resolve(base_name, args.model_copy(update=chosen), allow_code=True)
    assert spec is not None
    observer = spec.build()
    if base_name == "weight":
        (found,) = solve_weights([Weight(spec, stream[-1], None, "")])
        expected = observer(stream[-1]).get_qparams()
    else:
        statistics = {key: make("") for key, make in spec.statistics.items()}
        for tensor in stream:
            observer(tensor)
            for statistic in statistics.values():
                statistic.update(tensor)
        solved = spec.solve_stream(statistics)
        assert solved is not None
        found, expected = solved, observer.get_qparams()
    for ours, theirs in zip(found.values(), expected.values(), strict=True):
        assert (ours is None) == (theirs is None)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.float(), theirs.float())


LAWS: tuple[Law, ...] = (
    parts_say_the_same,
    merge_equals_replay,
    merging_with_nothing_changes_nothing,
    nothing_is_shared,
    reset_forgets,
    state_dict_round_trips,
    copies_know_the_same,
    reading_changes_nothing,
    order_and_batching,
    moves_keep_precision,
    empty_changes_nothing,
    args_stay_untouched,
)


# Statistics

STATISTICS: dict[str, Callable[[], Statistic]] = {
    "BlockHessians": lambda: BlockHessians(4),
    "PairedHessians": lambda: PairedHessians(3),
    "Extrema": Extrema,
    "LastRange": LastRange,
    "MovingAverage": MovingAverage,
    "SquareSums": SquareSums,
    "TokenSquares": TokenSquares,
    "ValueCounts": ValueCounts,
}
FORGETFUL = ("LastRange", "MovingAverage")


def measured(name: str, stream: Stream, mask: Tensor | None = None) -> Statistic:
    """Return a statistic of a stream."""
    statistic = STATISTICS[name]()
    for tensor in stream:
        statistic.update(tensor, mask)
    return statistic


def assert_same_statistic(one: Statistic, other: Statistic) -> None:
    """Assert that two statistics know the same; sums of floats may be rounded in another order."""
    assert one.fields().keys() == other.fields().keys() != set()
    for name, value in one.fields().items():
        torch.testing.assert_close(value, other.fields()[name], rtol=1e-12, atol=0)
    assert one.num_tokens == other.num_tokens


def merging_is_replaying(name: str, stream: Stream) -> None:
    """Merging equals having seen both streams; a statistic that cannot do that refuses."""
    first, second = measured(name, stream[:2]), measured(name, stream[2:])
    if name in FORGETFUL:
        with pytest.raises(MergeError, match="depends on the order of the data"):
            first.merge(second)
    else:
        assert_same_statistic(first.merge(second), measured(name, stream))
    assert_same_statistic(STATISTICS[name]().merge(second), measured(name, stream[2:]))


def tokens_are_counted(name: str, stream: Stream) -> None:
    """Every token counts, but those that are masked, which might as well not be there."""
    assert measured(name, stream).num_tokens == sum(x.shape[:-1].numel() for x in stream)
    first = stream[0]
    mask = torch.arange(first.shape[:-1].numel()).reshape(first.shape[:-1]) % 3 != 1
    expected = measured(name, [first[mask]])
    assert_same_statistic(measured(name, [first], mask), expected)
    assert expected.num_tokens == int(mask.sum())


def copies_go_apart(name: str, stream: Stream) -> None:
    """Who knows what another one knew goes on alone, and so does the other one."""
    for goes_on in (0, 1):
        both = measured(name, stream[:2]), measured(name, stream[-1:])
        both[1].copy_from(both[0])
        assert_same_statistic(*both)
        both[goes_on].update(stream[2])
        assert_same_statistic(both[goes_on], measured(name, stream[:3]))
        assert_same_statistic(both[1 - goes_on], measured(name, stream[:2]))


def a_reset_forgets(name: str, stream: Stream) -> None:
    """After a reset nothing is left of what was seen."""
    statistic = measured(name, stream[:2])
    statistic.reset()
    assert not statistic.fields()
    assert statistic.num_tokens == 0
    statistic.update(stream[3])
    assert_same_statistic(statistic, measured(name, stream[3:]))


def configurations_tell_what_is_measured(name: str, stream: Stream) -> None:
    """Two of a kind measure the same, whatever they have seen; those of other kinds do not."""
    ours = measured(name, stream).configuration()
    assert ours == STATISTICS[name]().configuration()
    assert all(make().configuration() != ours for n, make in STATISTICS.items() if n != name)


STATISTIC_LAWS: tuple[Callable[[str, Stream], None], ...] = (
    merging_is_replaying,
    tokens_are_counted,
    copies_go_apart,
    a_reset_forgets,
    configurations_tell_what_is_measured,
)
