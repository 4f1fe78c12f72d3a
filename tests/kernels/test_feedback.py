"""Error feedback and descent, against the textbook in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import FORMATS
from engines import NATIVE_ENGINES, threads_in_use, with_engines
from torch import Tensor

from calipers.kernels.hessian import Rounding, descend, feed_back
from calipers.numerics.formats import Format

KINDS = ["int3", "int4", "int4_asym", "int8", "int8_asym", "fp8", "fp8_asym", "fp4"]
SHAPES = [(1, 1), (1, 37), (5, 130), (70, 128), (11, 300)]
GROUPS = ["one", "of 32", "permuted", "rows alike"]


class Layer(NamedTuple):
    """A weight, its Hessian and its scales."""

    weight: Tensor
    hessian: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    fmt: Format

    @property
    def factor(self) -> Tensor:
        """The unit upper triangle M of H = M D Mᵀ."""
        root = torch.linalg.cholesky(self.hessian.flip(0, 1)).flip(0, 1)
        return root / root.diagonal()

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.scales, self.zeros, self.groups, self.fmt)

    def error(self, values: Tensor) -> float:
        difference = values.double() - self.weight.double()
        return float(((difference @ self.hessian) * difference).sum())

    def positions(self, values: Tensor, column: int) -> Tensor:
        """Where values of a column lie on the grid of numbers."""
        scale, zero = self.parameters(column)
        return values.double() / scale + zero

    def parameters(self, column: int) -> tuple[Tensor, Tensor]:
        group = int(self.groups[column])
        scale = self.scales[:, group].double()
        return scale, torch.zeros(1) if self.zeros is None else self.zeros[:, group].double()

    def rounded(self, values: Tensor, column: int) -> Tensor:
        """Round to the nearest number, by trying all of them."""
        numbers = self.fmt.values().double()
        distances = (self.positions(values, column).unsqueeze(-1) - numbers).abs()
        scale, zero = self.parameters(column)
        return (numbers[distances.argmin(-1)] - zero) * scale


def layer(kind: str, shape: tuple[int, int], cut: str, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    rows, columns = shape
    fmt = Format.of(QuantizationArgs(**FORMATS[kind]))
    groups = torch.arange(columns) // 32 if cut in ("of 32", "permuted") else torch.zeros(columns)
    groups = groups[torch.randperm(columns)] if cut == "permuted" else groups
    count = int(groups.max()) + 1
    scaled = 1 if cut == "rows alike" else rows
    scales = (torch.rand(scaled, count) * 0.5 + 0.8) * 3 / fmt.limits[1]
    signs = torch.randn(scaled, count).sign()
    zeros = None if fmt.symmetric else torch.randint(-3, 4, (scaled, count)).float()
    inputs = torch.randn(2 * columns + 1, columns) @ torch.randn(columns, columns) / columns**0.5
    hessian = (inputs.T @ inputs).double() / len(inputs)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    return Layer(torch.randn(shape), hessian, scales * signs, zeros, groups.to(torch.int64), fmt)


def textbook(of: Layer) -> tuple[Tensor, Tensor]:
    """GPTQ as it was published: with the inverse, each error spread over the columns behind it.

    Returns what becomes of the weight, and what each value was when it was rounded.
    """
    left = of.weight.double().clone()
    upper = torch.linalg.cholesky(torch.linalg.inv(of.hessian), upper=True)
    result = torch.empty_like(left)
    for j in range(left.shape[1]):
        result[:, j] = of.rounded(left[:, j], j)
        error = (left[:, j] - result[:, j]) / upper[j, j]
        left[:, j + 1 :] -= error.outer(upper[j, j + 1 :])
    return result, left


@with_engines("kind, shape, cut", KINDS, SHAPES, GROUPS)
def test_same_codes_as_the_textbook(kind: str, shape: tuple[int, int], cut: str) -> None:
    of = layer(kind, shape, cut)
    expected, before = textbook(of)
    found = feed_back(of.weight, of.factor, of.rounding, block=48)
    assert found.dtype == torch.float32
    split = 0
    for row in range(shape[0]):
        differ = (found[row].double() - expected[row]).abs() > 1e-5 * expected[row].abs() + 1e-6
        if not differ.any():
            continue
        # Only a tie may fall to either side; then all behind it is another way to go.
        split, j = split + 1, int(differ.nonzero()[0])
        ends = (of.positions(v[:, j], j)[row] for v in (found, expected))
        middle = sum(ends) / 2
        assert abs(of.positions(before[:, j], j)[row] - middle) < 1e-3 * max(1, abs(middle))
    assert split <= max(1, shape[0] // 8)


@pytest.mark.parametrize("block", [1, 7, 128, 1000])
def test_blocks_do_not_matter(block: int) -> None:
    of = layer("int4", (20, 150), "of 32")
    expected = feed_back(of.weight.double(), of.factor, of.rounding, block=33)
    found = feed_back(of.weight.double(), of.factor, of.rounding, block=block)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_memory_and_dtype(dtype: torch.dtype) -> None:
    of = layer("int4_asym", (20, 70), "of 32")
    assert of.zeros is not None
    plain = of._replace(weight=of.weight.to(dtype).to(torch.promote_types(dtype, torch.float32)))
    expected = feed_back(plain.weight, of.factor, of.rounding)
    scales, zeros = of.scales.T.contiguous().T, of.zeros.T.contiguous().T
    strided_rounding = Rounding(scales, zeros, of.groups.repeat(2)[:70], of.fmt)
    strided = of.weight.to(dtype).T.contiguous().T
    found = feed_back(strided, of.factor.T.contiguous().T, strided_rounding)
    assert torch.equal(found, expected)
    moved = descend(found.T.contiguous().T, strided, of.hessian, strided_rounding, 2)
    again = descend(expected, plain.weight, of.hessian, of.rounding, 2)
    assert torch.equal(moved[0], again[0])
    assert moved[1] == again[1] > 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": torch.ones(3, 40).int()}, "matrix of floats"),
        ({"weight": torch.ones(40)}, "matrix of floats"),
        ({"hessian": torch.eye(39, dtype=torch.float64)}, "for 40 columns"),
        ({"scales": torch.ones(2, 2)}, "for 3 rows"),
        ({"zeros": torch.ones(1, 2)}, "same shape"),
        ({"groups": torch.zeros(40)}, "int64"),
        ({"groups": torch.full((40,), 2)}, "must number the 2 columns"),
        ({"groups": torch.full((40,), -1)}, "must number the 2 columns"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], match: str) -> None:
    of = layer("int4_asym", (3, 40), "of 32")._replace(**change)
    with pytest.raises(ValueError, match=match):
        feed_back(of.weight, of.hessian, of.rounding)
    with pytest.raises(ValueError, match=match):
        descend(of.weight, of.weight, of.hessian, of.rounding, 1)


# Descent


def sweep(values: Tensor, of: Layer) -> Tensor:
    """One sweep by its definition: a column takes the number with the least error."""
    values = values.double().clone()
    for j in range(values.shape[1]):
        if of.hessian[j, j] <= 0:
            continue
        pull = (values - of.weight.double()) @ of.hessian[:, j]
        values[:, j] = of.rounded(values[:, j] - pull / of.hessian[j, j], j)
    return values


@with_engines("kind, shape, cut", KINDS, SHAPES, GROUPS)
def test_descends_to_where_nothing_is_better(kind: str, shape: tuple[int, int], cut: str) -> None:
    of = layer(kind, shape, cut)
    values = feed_back(of.weight, of.factor, of.rounding)
    errors, plain, changes = [of.error(values)], values.double(), []
    for _ in range(60):
        values, changed = descend(values, of.weight, of.hessian, of.rounding, sweeps=1, block=48)
        plain = sweep(plain, of)
        errors.append(of.error(values))
        changes.append(changed)
        # Near ties go either way, in which the plain one may have more luck.
        assert errors[-1] <= of.error(plain) * 1.02 + 1e-9
        if not changed:
            break
    assert not changes[-1]
    assert errors == sorted(errors, reverse=True)
    for j in range(shape[1]):  # no other number is better by more than rounding
        scale, zero = of.parameters(j)
        others = (of.fmt.values().double()[:, None] - zero) * scale - values[:, j]
        pull = (values.double() - of.weight) @ of.hessian[:, j]
        gain = others * (others * of.hessian[j, j] + 2 * pull)
        assert bool((gain >= -2e-4 * others.square() * of.hessian[j, j] - 1e-6).all())


@with_engines("kind", ["int3", "fp4"])
def test_pulls_that_are_known_are_used_and_kept_up_to_date(kind: str) -> None:
    of = layer(kind, (90, 200), "of 32")
    start = feed_back(of.weight, of.factor, of.rounding)
    expected, count = descend(start, of.weight, of.hessian, of.rounding, sweeps=3, block=64)
    hessian = of.hessian.float()
    pulls = (start - of.weight) @ hessian
    values, changed = descend(
        start, of.weight, of.hessian, of.rounding, sweeps=3, block=64, pulls=pulls
    )
    assert changed == count > 0
    assert torch.equal(values, expected)
    scale = float(pulls.abs().max())
    torch.testing.assert_close(pulls, (values - of.weight) @ hessian, rtol=0, atol=1e-4 * scale)


def test_many_sweeps_are_one_after_the_other() -> None:
    of = layer("int3", (90, 200), "of 32")
    values = feed_back(of.weight, of.factor, of.rounding)
    whole, total = descend(values, of.weight, of.hessian, of.rounding, sweeps=5, block=64)
    sum_of_changes = 0
    for _ in range(5):
        values, changed = descend(values, of.weight, of.hessian, of.rounding, sweeps=1, block=64)
        sum_of_changes += changed
    # Pulls are then computed anew, and ties fall to either side.
    assert of.error(whole) == pytest.approx(of.error(values), rel=1e-3)
    assert total == pytest.approx(sum_of_changes, rel=0.05)
    assert (whole == values).float().mean() > 0.97


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_what_is_no_gain_is_no_change(start: float) -> None:
    """Half of a step: both neighbours err alike."""
    of = layer("int4", (1, 1), "one")._replace(scales=torch.ones(1, 1))
    values = torch.full((1, 1), start)
    found, changed = descend(values, torch.full((1, 1), 0.5), of.hessian, of.rounding, sweeps=2)
    assert torch.equal(found, values)
    assert not changed


@pytest.mark.parametrize("diagonal", [None, 0.0, -1.0])
def test_dead_columns_stay(diagonal: float | None) -> None:
    of = layer("int4", (9, 60), "of 32")
    dead = torch.tensor([0, 31, 59])
    if diagonal is None:
        of.hessian[dead] = 0
        of.hessian[:, dead] = 0
    else:  # which no data has, but rounding may
        of.hessian[dead, dead] = diagonal
    start = torch.zeros(9, 60)
    values, changed = descend(start, of.weight, of.hessian, of.rounding, sweeps=9)
    assert changed
    assert not values[:, dead].any()
    assert of.error(values) < of.error(start)


def test_nothing_to_do_is_done_at_once() -> None:
    of = layer("int4", (9, 60), "one")
    values, changed = descend(of.weight, of.weight, of.hessian, of.rounding, sweeps=0)
    assert torch.equal(values, of.weight)
    assert not changed
    assert values.data_ptr() != of.weight.data_ptr()
    optimum, _ = descend(values, of.weight, of.hessian, of.rounding, sweeps=99)
    assert descend(optimum, of.weight, of.hessian, of.rounding, sweeps=3)[1] == 0


@with_engines("kind", ["int4", "fp4"], engines=NATIVE_ENGINES)
def test_threads_do_not_matter(kind: str) -> None:
    of = layer(kind, (600, 200), "permuted")
    found = []
    for threads in (1, 2, 5):
        with threads_in_use(threads):
            values = feed_back(of.weight, of.factor, of.rounding)
            found.append((values, *descend(values, of.weight, of.hessian, of.rounding, sweeps=3)))
    for values, moved, changed in found[1:]:
        assert torch.equal(values, found[0][0])
        assert torch.equal(moved, found[0][1])
        assert changed == found[0][2] > 0
