"""Documents → samples of at most max_seq_length tokens: cut off, or packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from calipers.calibration.data.records import RecordTokenizer
from calipers.calibration.data.sample import Sample
from calipers.calibration.data.sampling import Sampling
from calipers.calibration.data.sources import Records, shuffled
from calipers.errors import Option, Words, empty_data, no_meaning


def take_samples(
    source: Records, encoder: RecordTokenizer, sampling: Sampling
) -> tuple[list[Sample], tuple[Words, ...]]:
    """Take the samples that are wanted, and those before them that are to be passed over.

    :return: the samples, never none, and what the user should know about them
    """
    count, length = sampling.skip + sampling.num_samples, sampling.max_seq_length
    needed = None if source.one_document else length * (count if sampling.packing else 1)
    texts = (encoder.sample(record, place, needed) for place, record in source.numbered)
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
        samples, cut = truncated(documents, count, length)
        notes += _about_cutting(cut, len(samples), length)
    if not samples:
        marked = "records of which no token is marked" if sampling.mask else "empty records"
        raise empty_data(source.name, f"has only {marked}")
    return samples, notes


def truncated(documents: Iterable[Sample], count: int, length: int) -> tuple[list[Sample], int]:
    """Take the beginnings of the first documents.

    :return: the samples, and how many of them were cut off
    """
    taken = list(islice(documents, count))
    return [text[:length] for text in taken], sum(len(text) > length for text in taken)


def packed(
    documents: Iterable[Sample], count: int | None, length: int, separator: int | None
) -> list[Sample]:
    """Join documents and cut the whole into pieces of exactly ``length`` tokens.

    What remains at the end is shorter and is dropped, unless it is all there is. So are pieces of
    which no token counts.

    :param count: how many pieces are wanted; None for all
    :param separator: the token put between two documents, if the first does not end with it

    >>> documents = [Sample(torch.tensor([1, 2, 3])), Sample(torch.tensor([4, 5]))]
    >>> [piece.ids for piece in packed(documents, None, 2, separator=0)]
    [tensor([1, 2]), tensor([3, 0]), tensor([4, 5])]
    """
    joined: list[Sample] = []
    total = 0
    for part in _separated(documents, separator):
        if count is not None and total >= count * length:
            break
        joined.append(part)
        total += len(part)
    if not joined:
        return []
    whole = Sample.joined(joined)
    pieces = [whole[start : start + length] for start in range(0, total, length)]
    if len(pieces) > 1 and len(pieces[-1]) < length:
        pieces.pop()
    return [piece for piece in pieces[:count] if piece.num_counted]


def _separated(documents: Iterable[Sample], separator: int | None) -> Iterator[Sample]:
    last = separator
    for text in documents:
        if separator is not None and last != separator:
            between = torch.tensor([separator])
            yield Sample(between, None if text.counted is None else between.new_zeros(1).bool())
        yield text
        last = int(text.ids[-1])


def _about_cutting(cut: int, samples: int, length: int) -> tuple[Words, ...]:
    if not cut:
        return ()
    return (
        f"{cut} of {samples} samples are longer than "
        + Option("max_seq_length", length)
        + " and are cut off there; "
        + Option("packing", True)
        + " uses all of a text.",
    )
