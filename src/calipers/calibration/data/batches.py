"""Calibration batches: samples taken from a dataset, padded and dealt to the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from calipers.calibration.data.columns import (
    COLUMNS,
    MaskChoice,
    about_unused,
    check_mask,
    marked_tokens,
    no_mask,
)
from calipers.calibration.data.records import (
    RecordTokenizer,
    Sample,
    check_ids,
    special_id,
    whole_numbers,
)
from calipers.calibration.data.sources import ReadyBatches, Records, open_source, shuffled
from calipers.errors import (
    CalipersWarning,
    DataError,
    Option,
    check_whole_number,
    empty_data,
    no_meaning,
    not_allowed,
)

Batch = dict[str, Tensor]
"""What a model is called with: input_ids and attention_mask, (rows, tokens) int64, and the like."""

COUNTED = "counted_tokens"
"""Which tokens of a batch count, (rows, tokens) int64, where not all but padding do.

It is no input of a model: statistics leave the other tokens out, the forward pass does not.
"""

PaddingSide = Literal["right", "left"]
Use = Literal["ranges", "importance", "evaluation"]
"""What data is for: static ranges of activations, sums of the inputs of weights, or judging."""

FEW_SAMPLES = 32
FEW_TOKENS = 4096
LONG_SAMPLE = 2048
"""How many tokens a sample has at most where nobody said it, and the model takes more."""

_LIKE_LENGTH = 1.125  # the longest sample of a batch, in terms of the shortest

_Made: TypeAlias = tuple[list[tuple[int, Batch]], list[int], tuple[str, ...]]
"""Batches, each with its part of the data, how many there are at each stop, and warnings."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which samples are taken, and how they become batches.

    :param num_samples: how many samples to take, over all ranks
    :param batch_tokens: where it is not 0, samples of like length share batches of at most so many
        tokens, padding included, instead of ``batch_size`` samples
    :param packing: join documents, with the end-of-text token between them, and cut the whole
        into samples of exactly ``max_seq_length``; a shorter rest is dropped unless it is all
        there is. Without it a document is a sample, cut off at ``max_seq_length``. None packs
        text files, which are one document, and nothing else
    :param shuffle: whether to take samples from everywhere, or from the beginning
    :param text_column: the column of the text, where records have several
    :param rank: which process this is; it gets the samples ``rank::world_size``
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
    warnings: tuple[str, ...] = ()
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
        batches, ends, notes = _dealt(source, sampling)
    else:
        batches, ends, notes = _sampled(source, tokenizer, sampling)
    if sampling.rank == 0:  # once in a job of many processes
        for note in notes:
            warnings.warn(CalipersWarning(note), stacklevel=2)
    parts = tuple(part for part, _ in batches)
    return Batches(tuple(batch for _, batch in batches), notes, parts, tuple(ends))


def limits_of(model: Any, max_seq_length: int | None) -> dict[str, Any]:
    """Return what a model sets bounds to: the ids of tokens, and how many of them a sample has.

    :param max_seq_length: what the user wants; None for what the model takes
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or LONG_SAMPLE
    if max_seq_length is None:
        max_seq_length = min(LONG_SAMPLE, context)
    elif isinstance(max_seq_length, int) and max_seq_length > context:
        warning = CalipersWarning(
            f"is longer than what {type(model).__name__} takes: {context} tokens "
            "(max_position_embeddings). What it computes beyond them may mean nothing",
            subject=Option("max_seq_length", max_seq_length),
        )
        warnings.warn(warning, stacklevel=2)
    vocab_size = getattr(config, "vocab_size", None)
    return {"vocab_size": vocab_size, "max_seq_length": max_seq_length}


# Samples of records


def _sampled(source: Records, tokenizer: Any, sampling: Sampling) -> _Made:
    """Take samples of records, and make batches of those of this rank."""
    encoder = RecordTokenizer.of(
        (source.place(0), source.first),
        tokenizer,
        sampling.text_column,
        sampling.vocab_size,
        sampling.mask,
    )
    taken, notes = _take_samples(source, encoder, sampling)
    samples = taken[sampling.skip :]
    if not samples:
        problem = f"has {len(taken)} samples, and " + Option("skip", sampling.skip)
        raise empty_data(source.name, problem + " passes over all of them")
    notes += _about_size(len(samples), sum(sample.num_counted for sample in samples), sampling)
    # Padding is masked: its token only has to exist.
    names = ("pad_token_id", "eos_token_id")
    tokens = (special_id(tokenizer, name, sampling.vocab_size) for name in names)
    pad = next((token for token in tokens if token is not None), 0)
    batches: list[tuple[int, Batch]] = []
    ends = []
    stops = [stop for stop in sampling.stops if stop < len(samples)]
    for start, end in pairwise([0, *stops, len(samples)]):
        mine = samples[start + (sampling.rank - start) % sampling.world_size : end]
        for part, group in _groups(mine[:: sampling.world_size], sampling):
            batches.append((part, padded(group, sampling.padding_side, pad)))
        ends.append(len(batches))
    return batches, ends, notes


def _take_samples(
    source: Records, encoder: RecordTokenizer, sampling: Sampling
) -> tuple[list[Sample], tuple[str, ...]]:
    """Take the samples that are wanted, and those before them that are to be passed over.

    :return: the samples, never none, and what the user should know about them
    """
    count, length = sampling.skip + sampling.num_samples, sampling.max_seq_length
    needed = None if source.one_document else length * (count if sampling.packing else 1)
    numbered = source.numbered(sampling.order)
    texts = (encoder.sample(record, place, needed) for place, record in numbered)
    within = None if sampling.packing or source.one_document else length
    documents = (text for text in texts if text[:within].num_counted)
    notes = source.notes + encoder.notes
    if source.one_document:
        if sampling.packing is False:
            raise no_meaning("packing", sampling.packing, "a text file (one document)")
        pieces = packed(documents, None, length, None)
        samples = [pieces[index] for index in shuffled(len(pieces), sampling.order)[:count]]
    elif sampling.packing:
        samples = packed(documents, count, length, encoder.separator)
    else:
        whole = list(islice(documents, count))
        samples = [text[:length] for text in whole]
        cut = sum(len(text) > length for text in whole)
        if cut:
            longer = f"{cut} of {len(samples)} samples are longer than "
            remedy = " and are cut off there; " + Option("packing", True) + " uses all of a text."
            notes += (longer + Option("max_seq_length", length) + remedy,)
    if not samples:
        marked = "records of which no token is marked" if sampling.mask else "empty records"
        raise empty_data(source.name, f"has only {marked}")
    return samples, notes


def packed(
    documents: Iterable[Sample], count: int | None, length: int, separator: int | None
) -> list[Sample]:
    """Join documents and cut the whole into pieces of exactly ``length`` tokens.

    What remains at the end is shorter and is dropped, unless it is all there is. So are pieces of
    which no token counts.

    :param count: how many pieces are wanted; None for all
    :param separator: the token put between two documents, if the first does not end with it
    """
    parts: list[Sample] = []
    total, last = 0, separator
    for text in documents:
        if count is not None and total >= count * length:
            break
        if separator is not None and last != separator:
            marks = None if text.counted is None else torch.zeros(1, dtype=torch.bool)
            parts.append(Sample(torch.tensor([separator]), marks))
            total += 1
        parts.append(text)
        total += len(text)
        last = int(text.ids[-1])
    if not parts:
        return []
    whole = Sample.joined(parts)
    pieces = [whole[start : start + length] for start in range(0, total, length)]
    if len(pieces) > 1 and len(pieces[-1]) < length:
        pieces.pop()
    return [piece for piece in pieces[:count] if piece.num_counted]


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


def padded(samples: Sequence[Sample], side: PaddingSide, pad: int) -> Batch:
    """Return samples as one batch, as long as the longest of them."""
    length = max(map(len, samples))
    ids = torch.full((len(samples), length), pad, dtype=torch.int64)
    mask, counted = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        start = length - len(sample) if side == "left" else 0
        place = slice(start, start + len(sample))
        ids[row, place], mask[row, place] = sample.ids, 1
        counted[row, place] = 1 if sample.counted is None else sample.counted.long()
    marked = any(sample.counted is not None for sample in samples)
    return {"input_ids": ids, "attention_mask": mask, **({COUNTED: counted} if marked else {})}


def counted_tokens(batch: Batch) -> Tensor:
    """Return which tokens of a batch count, (rows, tokens): all but padding, or fewer."""
    return batch.get(COUNTED, batch["attention_mask"])


# Batches that the user made


def _dealt(source: ReadyBatches, sampling: Sampling) -> _Made:
    """Take every ``world_size``-th batch that the user made; the others are only counted."""
    for option in ("packing", "skip"):
        if getattr(sampling, option):
            raise no_meaning(option, getattr(sampling, option), "batches that are ready-made")
    mine: list[tuple[int, Batch]] = []
    ends, stops = [], iter(sampling.stops)
    stop = next(stops, None)
    samples = tokens = 0
    notes: tuple[str, ...] = ()
    for index, batch in enumerate(_checked(source.batches, sampling)):
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
    return mine, ends, notes + _about_size(samples, tokens, sampling)


def _checked(batches: Iterable[Any], sampling: Sampling) -> Iterator[Batch]:
    """Go through a user's batches until there are enough rows.

    Masks that the data has are in them, whether they are used or not. If only marked tokens count,
    batches without any are passed over.
    """
    rows = 0
    for index, given in enumerate(batches):
        batch = _as_batch(given, f"Batch {index}", sampling.vocab_size)
        if sampling.mask is not None:
            if COUNTED not in batch:
                raise no_mask(f"Batch {index}", f"has no mask (it has: {', '.join(given)})")
            if not batch[COUNTED].any():
                continue
        left = sampling.num_samples - rows
        if len(batch["input_ids"]) > left and _can_choose_rows(batch):
            first = {key: value[:left] for key, value in batch.items()}
            batch = first if counted_tokens(first).any() else batch
        rows += len(batch["input_ids"])
        yield batch
        if rows >= sampling.num_samples:
            return
    if not rows:
        raise empty_data("The dataset", "has only batches of which no token is marked")


def _as_batch(given: Any, where: str, vocab_size: int | None) -> Batch:
    if not isinstance(given, Mapping):
        given = {"input_ids": given}
    if "input_ids" not in given:
        raise _wrong_batch(where, f"has no input_ids (it has: {', '.join(map(str, given))})")
    ids = _matrix(given["input_ids"], where, "input_ids")
    check_ids(ids, where, vocab_size)
    mask = torch.ones_like(ids)
    if given.get("attention_mask") is not None:
        mask = _matrix(given["attention_mask"], where, "attention_mask")
    if mask.shape != ids.shape:
        shapes = f"{tuple(ids.shape)} and an attention_mask of shape {tuple(mask.shape)}"
        raise _wrong_batch(where, f"has input_ids of shape {shapes}")
    if not mask.any():
        raise DataError(
            f"is all padding: its attention_mask of shape {tuple(mask.shape)} is zero everywhere",
            subject=where,
            hint="The mask is 1 for tokens that count; correct it, or leave the batch out.",
        )
    # Labels would have the model compute a loss, of logits that it is not asked for.
    others = {
        key: value
        for key, value in given.items()
        if isinstance(value, Tensor) and key not in COLUMNS
    }
    marked = marked_tokens(given, ids)
    counted = {} if marked is None else {COUNTED: mask * marked}
    return {**others, "input_ids": ids, "attention_mask": mask, **counted}


def _wrong_batch(where: str, problem: str) -> DataError:
    return DataError(
        problem,
        subject=where,
        hint="A batch is a dict with input_ids of shape (rows, tokens) and, if there is padding, "
        "an attention_mask of the same shape.",
    )


def _matrix(value: Any, where: str, name: str) -> Tensor:
    is_mask = isinstance(value, Tensor) and name == "attention_mask"
    matrix = (value != 0).to(torch.int64).cpu() if is_mask else whole_numbers(value)
    if matrix is None or matrix.ndim != 2:
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
        kind = "" if matrix is not None else ", not of whole numbers"
        raise _wrong_batch(where, f"has {name} of {what}{kind}")
    return matrix.to(torch.int64)


def _rows_of_parts(batch: Batch, sampling: Sampling) -> Iterator[tuple[int, Batch]]:
    """Cut a batch into one for each part; it stays whole where a tensor has no rows to choose."""
    parts: dict[int, list[int]] = {}
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    for row, (ids, marks) in enumerate(rows):
        if sampling.part_of is not None and bool(marks.any()):
            parts.setdefault(sampling.part_of(ids[marks != 0]), []).append(row)
    if len(parts) < 2 or not _can_choose_rows(batch):
        yield next(iter(parts), 0), batch
        return
    for part, chosen in parts.items():
        yield part, {name: value[chosen] for name, value in batch.items()}


def _can_choose_rows(batch: Batch) -> bool:
    rows = len(batch["input_ids"])
    return all(value.ndim and len(value) == rows for value in batch.values())


def _about_size(samples: int, tokens: int, sampling: Sampling) -> tuple[str, ...]:
    if sampling.use == "evaluation":
        return ()
    notes: list[str] = []
    if samples < sampling.num_samples:
        asked = f"The data has {samples} samples; {sampling.num_samples} were asked for ("
        notes.append(asked + Option("num_samples") + ").")
    if sampling.use == "ranges" and (samples < FEW_SAMPLES or tokens < FEW_TOKENS):
        notes.append(
            f"{samples} samples with {tokens} tokens: static ranges from so little data are "
            f"unreliable. Use at least {FEW_SAMPLES} samples and {FEW_TOKENS} tokens."
        )
    return tuple(notes)
