"""From a dataset to the batches one process runs through the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from calipers.calibration.data.padding import Batch, PaddingSide, batched, pad_id
from calipers.calibration.data.ready import checked
from calipers.calibration.data.records import Reader
from calipers.calibration.data.samples import take_samples
from calipers.calibration.data.sources import ReadyBatches, open_source
from calipers.errors import CalipersWarning, DataOptionError, EmptyDataError

FEW_SAMPLES = 32
FEW_TOKENS = 4096
LONG_SAMPLE = 2048
"""How many tokens a sample has at most where nobody said it, and the model takes more."""

Use = Literal["ranges", "importance", "evaluation"]
"""What data is for: static ranges of activations, sums of the inputs of weights, or judging."""


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of one rank; can be gone through again and again.

    :param batches: the batches, each with input_ids and attention_mask, (rows, tokens) int64
    :param warnings: what the user was told about the data of all ranks
    """

    batches: tuple[Batch, ...]
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Go through the batches; each is a new dict of the same tensors."""
        return map(dict, self.batches)

    @property
    def num_samples(self) -> int:
        """How many samples this rank has."""
        return sum(len(batch["input_ids"]) for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank has, padding not counted."""
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)


def calibration_batches(
    dataset: Any,
    tokenizer: Any = None,
    *,
    num_samples: int = 512,
    max_seq_length: int = 2048,
    batch_size: int = 1,
    packing: bool | None = None,
    padding_side: PaddingSide = "right",
    shuffle: bool = True,
    seed: int = 0,
    text_column: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int | None = None,
    use: Use = "ranges",
    skip: int = 0,
) -> Batches:
    """Turn whatever data the user has into batches of token ids.

    Records are shuffled before ``num_samples`` of them are taken; the same seed takes the same
    samples, whatever the batch size and the number of ranks. Empty records are passed over.
    Batches that come ready-made (a DataLoader) are neither shuffled, cut nor padded, and every
    rank must be given the same ones: they are dealt to the ranks in turn.

    :param dataset: the path of a text, .jsonl, .json or .parquet file or of a folder of
        ``save_to_disk``; the name of a data set, ``NAME[@CONFIG][:SPLIT]``; a Dataset of
        `datasets`; a list of texts, chats, records or lists of token ids; a 2-D tensor of token
        ids; a DataLoader or another iterable of batches
    :param tokenizer: for text and chats
    :param num_samples: how many samples to take, over all ranks
    :param max_seq_length: the longest sample, in tokens
    :param batch_size: samples per batch
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
    """
    _check_numbers(
        num_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        world_size=world_size,
    )
    if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
        raise DataOptionError("skip", skip, "a whole number, 0 or more")
    if not 0 <= rank < world_size:
        raise DataOptionError("rank", rank, f"0 to {world_size - 1}, below world_size")
    if padding_side not in get_args(PaddingSide):
        raise DataOptionError("padding_side", padding_side, "'right' or 'left'")
    order = seed if shuffle else None
    source = open_source(dataset, seed=order, text_column=text_column)
    if isinstance(source, ReadyBatches):
        if packing:
            raise DataOptionError("packing", packing, "left out for batches that are ready-made")
        if skip:
            raise DataOptionError("skip", skip, "left out for batches that are ready-made")
        ready = checked(source.batches, num_samples, vocab_size)
        return _told(_dealt(ready, num_samples, rank, world_size, use), rank)
    reader = Reader.of(source.first, tokenizer, text_column, vocab_size)
    taken, notes = take_samples(source, reader, skip + num_samples, max_seq_length, packing, order)
    samples = taken[skip:]
    if not samples:
        problem = f"has {len(taken)} samples, and skip={skip} passes over all of them"
        raise EmptyDataError(source.name, problem)
    notes += _about_size(len(samples), sum(map(len, samples)), num_samples, use)
    pad = pad_id(tokenizer, vocab_size)
    ours = batched(samples[rank::world_size], batch_size, padding_side, pad)
    return _told(Batches(tuple(ours), notes), rank)


def limits_of(model: Any, max_seq_length: int | None) -> dict[str, Any]:
    """Return what a model sets bounds to: the ids of tokens, and how many of them a sample has.

    :param max_seq_length: what the user wants; None for what the model takes
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or LONG_SAMPLE
    if max_seq_length is None:
        max_seq_length = min(LONG_SAMPLE, context)
    elif isinstance(max_seq_length, int) and max_seq_length > context:
        warnings.warn(
            f"max_seq_length={max_seq_length} is longer than what {type(model).__name__} takes: "
            f"{context} tokens (max_position_embeddings). What it computes beyond them may mean "
            "nothing.",
            CalipersWarning,
            stacklevel=2,
        )
    return {
        "vocab_size": getattr(config, "vocab_size", None),
        "max_seq_length": max_seq_length,
    }


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise DataOptionError(name, number, "a whole number, 1 or more")


def _dealt(ready: Iterable[Batch], wanted: int, rank: int, world_size: int, use: Use) -> Batches:
    """Every ``world_size``-th batch; the others are only counted."""
    ours = []
    samples = tokens = 0
    for index, batch in enumerate(ready):
        samples += len(batch["input_ids"])
        tokens += int(batch["attention_mask"].sum())
        if index % world_size == rank:
            ours.append(batch)
    return Batches(tuple(ours), _about_size(samples, tokens, wanted, use))


def _about_size(samples: int, tokens: int, wanted: int, use: Use) -> tuple[str, ...]:
    if use == "evaluation":
        return ()
    notes = []
    if samples < wanted:
        notes.append(f"The data has {samples} samples; {wanted} were asked for (num_samples).")
    if use == "ranges" and (samples < FEW_SAMPLES or tokens < FEW_TOKENS):
        notes.append(
            f"{samples} samples with {tokens} tokens: static ranges from so little data are "
            f"unreliable. Use at least {FEW_SAMPLES} samples and {FEW_TOKENS} tokens."
        )
    return tuple(notes)


def _told(batches: Batches, rank: int) -> Batches:
    """Warn, once in a job of many processes."""
    if rank == 0:
        for sentence in batches.warnings:
            warnings.warn(sentence, CalipersWarning, stacklevel=3)
    return batches
