"""Patience is one for all pieces of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from engines import threads_in_use, with_engines
from exact import FACTORS, exact_error, run

from calipers.kernels import search
from calipers.kernels.search import RangeSearch, search_range


class TestPatience:
    """Errors that first rise and then fall: the best candidate is the sixth of int2."""

    args = QuantizationArgs(num_bits=2)
    view = torch.tensor([[[1.0, *[0.25] * 30]]])

    def errors(self) -> list[float]:
        low, high = torch.tensor([0.25]), torch.tensor([1.0])
        found = reference.candidate_errors(
            self.view.reshape(-1), "weight", self.args, low, high, FACTORS, 2.0
        )
        return list(found[:, 0])

    def stopped_at(self, patience: int) -> int:
        """Replay the definition by hand."""
        best, best_index, vain = np.inf, 0, 0
        for index, error in enumerate(self.errors()):
            if error < best:
                best, best_index, vain = error, index, 0
            else:
                vain += 1
                if vain >= patience:
                    break
        return best_index

    @pytest.mark.parametrize("patience", [0, 1, 2, 3, 4, 5, 8, 100])
    def test_as_defined(self, patience: int) -> None:
        assert run(self.view, self.args, patience=patience).item() == self.stopped_at(patience)

    def test_the_example_does_what_it_is_there_for(self) -> None:
        assert len({self.stopped_at(patience) for patience in (1, 100)}) > 1

    def test_none_is_endless(self) -> None:
        assert run(self.view, self.args).item() == int(np.argmin(self.errors()))

    def test_one_piece_that_improves_keeps_all_going(self) -> None:
        args = QuantizationArgs(num_bits=2, group_size=31)
        falling = torch.tensor([[[1.0, *[0.4] * 30]]])  # better with each of the first candidates
        together = torch.cat([self.view, falling], 1)
        assert run(self.view, args, patience=1).tolist() == [0]
        assert run(together, args, patience=1).tolist() == [6, 4]

    @pytest.mark.parametrize("patience", [0, 1, 3, 5])
    def test_devices_that_are_not_asked_agree(
        self, patience: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Elsewhere than on a CPU the search runs on, but nothing it finds may count."""
        eager = run(self.view, self.args, patience=patience)
        monkeypatch.setattr(search, "_asks_freely", lambda _: False)
        assert torch.equal(run(self.view, self.args, patience=patience), eager)


def replay(errors: torch.Tensor, patience: int) -> tuple[torch.Tensor, bool]:
    """Follow the definition candidate by candidate; also say whether rounding could decide."""
    least = torch.full(errors.shape[1:], torch.inf, dtype=torch.float64)
    best, vain, close = torch.zeros(errors.shape[1:], dtype=torch.int64), 0, False
    for index, error in enumerate(errors):
        close |= bool(((error - least).abs() < 1e-5 * least).any()) and index > 0
        better = error < least
        least, best[better] = torch.minimum(least, error), index
        vain = 0 if bool(better.any()) else vain + 1
        if vain >= patience:
            break
    return best, close


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_pieces_that_take_turns(patience: int) -> None:
    """Two kinds of pieces whose improvements let each other go on, again and again; the second
    kind stands alone in its vector, beside lanes without a piece."""
    args, decided = QuantizationArgs(num_bits=3), 0
    for seed in range(150):
        torch.manual_seed(seed)
        factors = (torch.rand(14) * 1.5 + 0.1).tolist()
        two = torch.randn(1, 2, 1, 1, 12)
        low, high = two.amin((0, -2, -1)), two.amax((0, -2, -1))
        ranges = [(low * torch.tensor(f), high * torch.tensor(f)) for f in factors]
        errors = torch.stack([exact_error(two, *r, args, 2.0) for r in ranges])
        best, close = replay(errors, patience)
        if close:
            continue
        decided += 1
        kinds = torch.tensor([0] * 16 + [1])
        _, found = search_range(
            RangeSearch(
                two[:, kinds],
                low[kinds],
                high[kinds],
                args,
                factors=factors,
                norm=2.0,
                patience=patience,
            )
        )
        assert torch.equal(found.flatten(), (high.flatten() * torch.tensor(factors)[best])[kinds])
    assert decided > 90


@with_engines(
    "shape, threads", [(1, 37, 1, 1, 20), (1, 19, 3, 1, 300), (1, 2, 1, 3, 45_000)], [1, 2, 7]
)
def test_patience_of_all_pieces_together(shape: tuple[int, ...], threads: int) -> None:
    """Pieces that are looked at early do not know yet how long patience lasts."""
    factors, decided = [1 - i / 25 for i in range(24)], 0
    for seed in range(20 if shape[-1] < 1000 else 6):
        torch.manual_seed(seed)
        args = QuantizationArgs(num_bits=2 + seed % 3)
        values = torch.randn(shape) * (torch.rand(shape) < 0.2)
        low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
        ranges = [(low * torch.tensor(f), high * torch.tensor(f)) for f in factors]
        errors = torch.stack([exact_error(values, *r, args, 2.0) for r in ranges])
        patience = 1 + seed % 5
        best, close = replay(errors, patience)
        if close:
            continue
        decided += 1
        with threads_in_use(threads):
            _, found = search_range(
                RangeSearch(values, low, high, args, factors=factors, norm=2.0, patience=patience)
            )
        assert torch.equal(found.flatten(), (high.flatten() * torch.tensor(factors)[best]))
    assert decided > 3
