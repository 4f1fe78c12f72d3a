"""From a dataset to the batches one process runs through the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from calipers.calibration.data.padding import COUNTED, Batch, counted_tokens, pad_id, padded
from calipers.calibration.data.records import RecordTokenizer
from calipers.calibration.data.sample import Sample
from calipers.calibration.data.samples import take_samples
from calipers.calibration.data.sampling import Sampling
from calipers.calibration.data.sources import ReadyBatches, Records, open_source
from calipers.calibration.data.token_masks import about_unused
from calipers.calibration.data.user_batches import check_batches
from calipers.errors import CalipersWarning, Option, Words, empty_data, no_meaning

_LIKE_LENGTH = 1.125  # the longest sample of a batch, in terms of the shortest
FEW_SAMPLES = 32
FEW_TOKENS = 4096
LONG_SAMPLE = 2048
"""How many tokens a sample has at most where nobody said it, and the model takes more."""


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of one rank; can be gone through again and again.

    :param batches: the batches, each with input_ids and attention_mask, (rows, tokens) int64;
        ``counted_tokens`` tells which tokens count, where not all of them do
    :param warnings: what the user was told about the data of all ranks
    :param parts: to which part of the data each batch belongs
    :param ends: how many batches there are at each point where the run may stop, the last for all
    """

    batches: tuple[Batch, ...]
    warnings: tuple[Words, ...] = ()
    parts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

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
        """How many tokens of this rank count; padding never does."""
        return sum(int(counted_tokens(batch).sum()) for batch in self.batches)


def calibration_batches(dataset: Any, tokenizer: Any = None, **options: Any) -> Batches:
    """Turn whatever data the user has into batches of token ids.

    Records are shuffled before samples are taken; the same seed takes the same samples, whatever
    the batch size and the number of ranks. Empty records are passed over. Batches that come
    ready-made (a DataLoader) are neither shuffled, cut nor padded, and every rank must be given
    the same ones: they are dealt to the ranks in turn.

    :param dataset: the path of a text, .jsonl, .json or .parquet file or of a folder of
        ``save_to_disk``; the name of a data set, ``NAME[@CONFIG][:SPLIT]``; a Dataset of
        `datasets`; a list of texts, chats, records or lists of token ids; a 2-D tensor of token
        ids; a DataLoader or another iterable of batches
    :param tokenizer: for text and chats
    :param options: which samples are taken, and how; see :class:`Sampling`
    """
    sampling = Sampling(**options)
    source = open_source(dataset, seed=sampling.order, text_column=sampling.text_column)
    if isinstance(source, ReadyBatches):
        batches = _dealt(source, sampling)
    else:
        batches = _sampled(source, tokenizer, sampling)
    if sampling.rank == 0:  # once in a job of many processes
        for sentence in batches.warnings:
            warnings.warn(CalipersWarning(sentence), stacklevel=2)
    return batches


def _sampled(source: Records, tokenizer: Any, sampling: Sampling) -> Batches:
    """Take samples of records, and make batches of those of this rank."""
    encoder = RecordTokenizer.of(
        source.first, tokenizer, sampling.text_column, sampling.vocab_size, sampling.mask
    )
    taken, notes = take_samples(source, encoder, sampling)
    samples = taken[sampling.skip :]
    if not samples:
        passed = f"has {len(taken)} samples, and " + Option("skip", sampling.skip)
        raise empty_data(source.name, passed + " passes over all of them")
    notes += _about_size(len(samples), sum(each.num_counted for each in samples), sampling)
    pad = pad_id(tokenizer, sampling.vocab_size)
    found: list[tuple[int, Batch]] = []
    ends = []
    for start, end in _between(sampling.stops, len(samples)):
        mine = samples[start + (sampling.rank - start) % sampling.world_size : end]
        for part, group in _groups(mine[:: sampling.world_size], sampling):
            found.append((part, padded(group, sampling.padding_side, pad)))
        ends.append(len(found))
    return _with_parts(found, ends, notes)


def _between(stops: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Give the beginning and the end of what lies between stops.

    >>> list(_between((16, 24, 32), 30))
    [(0, 16), (16, 24), (24, 30)]
    """
    start = 0
    for end in (*(stop for stop in stops if stop < count), count):
        yield start, end
        start = end


def _groups(samples: Sequence[Sample], sampling: Sampling) -> Iterator[tuple[int, list[Sample]]]:
    """Go through samples in batches of one part each; the last of each may have fewer rows.

    Batches of at most so many tokens begin with the shortest samples, and have little padding.
    """
    waiting: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=len) if sampling.batch_tokens else samples:
        part = 0 if sampling.part_of is None else sampling.part_of(sample.ids)
        group = waiting.setdefault(part, [])
        if sampling.batch_tokens and group:
            is_full = (len(group) + 1) * len(sample) > sampling.batch_tokens
            if is_full or len(sample) > _LIKE_LENGTH * len(group[0]):
                yield part, waiting.pop(part)
                group = waiting.setdefault(part, [])
        group.append(sample)
        if not sampling.batch_tokens and len(group) == sampling.batch_size:
            yield part, waiting.pop(part)
    yield from waiting.items()


def _with_parts(
    found: Sequence[tuple[int, Batch]], ends: Sequence[int], notes: tuple[Words, ...]
) -> Batches:
    batches = tuple(batch for _, batch in found)
    return Batches(batches, notes, tuple(part for part, _ in found), tuple(ends))


def limits_of(model: Any, max_seq_length: int | None) -> dict[str, Any]:
    """Return what a model sets bounds to: the ids of tokens, and how many of them a sample has.

    :param max_seq_length: what the user wants; None for what the model takes
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or LONG_SAMPLE
    if max_seq_length is None:
        max_seq_length = min(LONG_SAMPLE, context)
    elif isinstance(max_seq_length, int) and max_seq_length > context:
        told = CalipersWarning(
            f"is longer than what {type(model).__name__} takes: {context} tokens "
            "(max_position_embeddings). What it computes beyond them may mean nothing",
            subject=Option("max_seq_length", max_seq_length),
        )
        warnings.warn(told, stacklevel=2)
    return {
        "vocab_size": getattr(config, "vocab_size", None),
        "max_seq_length": max_seq_length,
    }


def _dealt(source: ReadyBatches, sampling: Sampling) -> Batches:
    """Every ``world_size``-th batch that the user made; the others are only counted."""
    for option in ("packing", "skip"):
        if getattr(sampling, option):
            raise no_meaning(option, getattr(sampling, option), "batches that are ready-made")
    mine: list[tuple[int, Batch]] = []
    ends, stops = [], iter(sampling.stops)
    stop = next(stops, None)
    samples = tokens = 0
    notes: tuple[Words, ...] = ()
    ready = check_batches(source.batches, sampling.num_samples, sampling.vocab_size, sampling.mask)
    for index, batch in enumerate(ready):
        if sampling.mask is None and (counted := batch.pop(COUNTED, None)) is not None:
            attended = batch["attention_mask"] != 0
            notes = notes or about_unused(batch["input_ids"][attended], counted[attended] != 0)
        samples += len(batch["input_ids"])
        tokens += int(counted_tokens(batch).sum())
        if index % sampling.world_size == sampling.rank:
            mine.extend(_rows_of_parts(batch, sampling))
        while stop is not None and samples >= stop:
            ends.append(len(mine))
            stop = next(stops, None)
    ends.append(len(mine))
    return _with_parts(mine, ends, notes + _about_size(samples, tokens, sampling))


def _rows_of_parts(batch: Batch, sampling: Sampling) -> Iterator[tuple[int, Batch]]:
    """Cut a batch into one for each part; it stays whole where a tensor has no rows to choose."""
    rows = len(batch["input_ids"])
    parts: dict[int, list[int]] = {}
    for row, (ids, marks) in enumerate(
        zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ):
        if sampling.part_of is not None and bool(marks.any()):
            parts.setdefault(sampling.part_of(ids[marks != 0]), []).append(row)
    if len(parts) < 2 or any(not value.ndim or len(value) != rows for value in batch.values()):
        yield next(iter(parts), 0), batch
        return
    for part, chosen in parts.items():
        yield part, {name: value[chosen] for name, value in batch.items()}


def _about_size(samples: int, tokens: int, sampling: Sampling) -> tuple[Words, ...]:
    if sampling.use == "evaluation":
        return ()
    notes: list[Words] = []
    if samples < sampling.num_samples:
        asked = f"The data has {samples} samples; {sampling.num_samples} were asked for ("
        notes.append(asked + Option("num_samples") + ").")
    if sampling.use == "ranges" and (samples < FEW_SAMPLES or tokens < FEW_TOKENS):
        notes.append(
            f"{samples} samples with {tokens} tokens: static ranges from so little data are "
            f"unreliable. Use at least {FEW_SAMPLES} samples and {FEW_TOKENS} tokens."
        )
    return tuple(notes)
