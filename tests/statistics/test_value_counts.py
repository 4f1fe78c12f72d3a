from __future__ import annotations

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st

from calipers.errors import MergeError
from calipers.kernels.reductions import BINS
from calipers.observers import ValueCountsObserver
from calipers.statistics.value_counts import ValueCounts

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INT8 = QuantizationArgs(num_bits=8)


def counted(*tensors: torch.Tensor) -> ValueCounts:
    counts = ValueCounts()
    for tensor in tensors:
        counts.update(tensor.reshape(1, -1))
    return counts


def as_counted(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor if tensor.dtype.itemsize == 2 else tensor.to(torch.bfloat16)
    return tensor.float().flatten() + 0.0


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4), st.integers(1, 3000))
def test_counts_are_those_of_unique(dtypes: list[torch.dtype], length: int) -> None:
    tensors = [(torch.randn(length) * 2).round(decimals=1).to(dtype) for dtype in dtypes]
    values, counts = next(counted(*tensors).distributions())
    expected = torch.cat([as_counted(tensor) for tensor in tensors]).unique(return_counts=True)
    assert torch.equal(values, expected[0])
    assert torch.equal(counts, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_value(dtype: torch.dtype) -> None:
    """NaN and Inf are in no distribution, the two zeros are one value, denormals are kept."""
    every = torch.arange(BINS, dtype=torch.int32).to(torch.int16).view(dtype)
    values, counts = next(counted(every).distributions())
    finite = every[torch.isfinite(every)].float()
    assert torch.equal(values, (finite + 0.0).unique())
    assert counts.sum() == len(finite)
    assert counts[values == 0].tolist() == [2]


def test_each_piece_has_its_own() -> None:
    counts = ValueCounts("k", "attn_head")
    counts.update(torch.tensor([[1.0, 1.0], [2.0, 3.0]]).reshape(1, 2, 1, 2))
    assert counts.counts_bfloat16.shape == (2, 1, 1, BINS)
    found = [[part.tolist() for part in piece] for piece in counts.distributions()]
    assert found == [[[1.0], [2]], [[2.0, 3.0], [1, 1]]]


class TestTables:
    """A table grows in place, unless somebody else holds it."""

    def test_grows_in_place(self) -> None:
        counts = counted(torch.ones(3))
        table = counts.counts_bfloat16
        counts.update(torch.ones(1, 2))
        assert counts.counts_bfloat16 is table
        assert table.sum() == 5

    def test_one_that_is_shared_is_copied(self) -> None:
        mine = torch.zeros(1, BINS, dtype=torch.int64)
        counts = ValueCounts()
        counts.absorb(counts_bfloat16=mine)
        counts.synced["counts_bfloat16"] = mine
        counts.update(torch.ones(1, 2))
        assert not mine.any()
        assert counts.counts_bfloat16.sum() == 2

    def test_copies_go_apart(self) -> None:
        counts = counted(torch.ones(3))
        other = copy.deepcopy(counts)
        merged = ValueCounts().merge(counts)
        for one, length in ((other, 1), (merged, 2), (counts, 3)):
            one.update(torch.ones(1, length))
        assert [int(c.counts_bfloat16.sum()) for c in (other, merged, counts)] == [4, 5, 6]

    def test_inference_mode(self) -> None:
        counts = ValueCounts()
        for dtype in (torch.float64, torch.bfloat16):  # in torch, and natively
            with torch.inference_mode():
                counts.update(torch.ones(1, 2, dtype=dtype))
            counts.update(torch.ones(1, 2, dtype=dtype))
        assert counts.counts_bfloat16.sum() == 8

    def test_statistics_that_were_handed_out_stay(self) -> None:
        observer = ValueCountsObserver("input", INT8)(torch.ones(2, 4))
        handed = observer.get_statistics()["counts_bfloat16"]
        observer(torch.ones(2, 4))
        assert (handed.sum(), observer.counts_bfloat16.sum()) == (8, 16)


class TestSaving:
    @given(st.integers(1, 3), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    def test_round_trip(self, heads: int, dtypes: list[torch.dtype]) -> None:
        args = QuantizationArgs(num_bits=8, strategy="attn_head")
        observer = ValueCountsObserver("k", args)
        for dtype in dtypes:
            observer(torch.randn(2, heads, 5, 4).to(dtype))
        saved = observer.state_dict()
        assert max(value.numel() for value in saved.values()) < 5000
        again = ValueCountsObserver("k", args)
        again.load_state_dict(saved)
        for name, value in observer.fields().items():
            assert torch.equal(value, again.fields()[name])

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda t: t + torch.tensor([[BINS], [0]]), r"bins must ascend within \[0, 65536\)"),
            (lambda t: t - torch.tensor([[BINS], [0]]), r"bins must ascend within \[0, 65536\)"),
            (lambda t: t.flip(1), r"bins must ascend within \[0, 65536\)"),
            (lambda t: t * torch.tensor([[1], [-1]]), "its counts must be positive"),
            (lambda t: t * torch.tensor([[1], [0]]), "its counts must be positive"),
            (lambda t: t[:1], r"int64 of shape \(2, n\), not torch.int64 \(1, 2\)"),
            (lambda t: t[0], r"int64 of shape \(2, n\), not torch.int64 \(2,\)"),
            (lambda t: t.float(), r"int64 of shape \(2, n\), not torch.float32 \(2, 2\)"),
        ],
    )
    def test_damaged(self, damage: object, problem: str) -> None:
        saved = ValueCountsObserver("input", INT8)(torch.tensor([[1.0, 2.0]])).state_dict()
        saved["counts_bfloat16"] = damage(saved["counts_bfloat16"])
        observer = ValueCountsObserver("input", INT8)(torch.ones(1, 3))
        with pytest.raises(MergeError, match=problem) as caught:
            observer.load_state_dict(saved)
        assert str(caught.value).startswith(
            "Observer 'value_counts' (input) cannot load 'counts_bfloat16': "
        )
        assert "Nothing was loaded." in str(caught.value)
        assert observer.counts_bfloat16.sum() == 3
        assert observer.max_vals == 1

    def test_shape_that_cannot_be(self) -> None:
        with pytest.raises(MergeError, match=r"\(2, 7\), which does not end in 65536"):
            ValueCounts().unpacked("counts_float16", torch.zeros(2, 0, dtype=torch.int64), (2, 7))


def test_many_counts_stay_exact() -> None:
    counts = counted(torch.ones(3))
    counts.counts_bfloat16 = counts.counts_bfloat16 * (2**60)
    counts.update(torch.ones(1, 1))
    assert int(next(counts.distributions()).counts) == 3 * 2**60 + 1
