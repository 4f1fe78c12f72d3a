"""Which samples of the data are taken, and how they become batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from calipers.calibration.data.padding import PaddingSide
from calipers.calibration.data.token_masks import MaskChoice, check_mask
from calipers.errors import check_whole_number, not_allowed

Use = Literal["ranges", "importance", "evaluation"]
"""What data is for: static ranges of activations, sums of the inputs of weights, or judging."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which samples are taken, and how they become batches.

    :param num_samples: how many samples to take, over all ranks
    :param max_seq_length: the longest sample, in tokens
    :param batch_size: samples per batch
    :param batch_tokens: where it is not 0, samples of like length share batches of at most so many
        tokens, padding included, instead of ``batch_size`` samples
    :param packing: join documents, with the end-of-text token between them, and cut the whole
        into samples of exactly ``max_seq_length``; a shorter rest is dropped unless it is all
        there is. Without it a document is a sample, cut off at ``max_seq_length``. None packs
        text files, which are one document, and nothing else
    :param padding_side: where shorter samples of a batch are filled up
    :param shuffle: whether to take samples from everywhere, or from the beginning
    :param seed: of the shuffling
    :param text_column: the column of the text, where records have several
    :param rank: which process this is; it gets the samples ``rank::world_size``
    :param world_size: how many processes there are
    :param vocab_size: how many tokens the model knows; ids beyond are refused
    :param use: what the data is for, which decides when it is too little
    :param skip: how many samples to pass over before the first is taken: with the same seed,
        length and packing, those that an earlier call took
    :param part_of: tells of the token ids of a sample to which part of the data it belongs;
        samples of different parts share no batch
    :param stops: after how many samples, over all ranks, the run may stop: no batch reaches over
    :param mask: ``assistant`` counts only the tokens that masks in the data, or the generation
        blocks of the chat template, mark; None counts all
    """

    num_samples: int = 512
    max_seq_length: int = 2048
    batch_size: int = 1
    batch_tokens: int = 0
    packing: bool | None = None
    padding_side: PaddingSide = "right"
    shuffle: bool = True
    seed: int = 0
    text_column: str | None = None
    rank: int = 0
    world_size: int = 1
    vocab_size: int | None = None
    use: Use = "ranges"
    skip: int = 0
    part_of: Callable[[Tensor], int] | None = None
    stops: tuple[int, ...] = ()
    mask: MaskChoice | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_seq_length", "batch_size", "world_size"):
            check_whole_number(name, getattr(self, name), least=1)
        check_whole_number("skip", self.skip, least=0)
        if not 0 <= self.rank < self.world_size:
            raise not_allowed("rank", self.rank, f"0 to {self.world_size - 1}, below world_size")
        check_mask(self.mask)
        if self.padding_side not in get_args(PaddingSide):
            raise not_allowed("padding_side", self.padding_side, "'right' or 'left'")

    @property
    def order(self) -> int | None:
        """The seed of the shuffling; None where nothing is shuffled."""
        return self.seed if self.shuffle else None
