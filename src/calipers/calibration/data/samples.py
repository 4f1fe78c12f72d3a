"""Documents → samples of at most max_seq_length tokens: cut off, or packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from calipers.calibration.data.records import Reader
from calipers.calibration.data.sources import Records, shuffled
from calipers.errors import DataOptionError, EmptyDataError

Sample = torch.Tensor
"""The token ids of one sample, (tokens,) int64."""


def take_samples(
    source: Records, reader: Reader, count: int, length: int, packing: bool | None, seed: int | None
) -> tuple[list[Sample], tuple[str, ...]]:
    """Take at most ``count`` samples of at most ``length`` tokens.

    :param seed: of the shuffling of the pieces of one document; None for their order
    :return: the samples, never none, and what the user should know about them
    """
    needed = None if source.one_document else length * (count if packing else 1)
    texts = (reader.token_ids(record, place, needed) for place, record in source.numbered)
    documents = (ids for ids in texts if len(ids))
    notes = source.notes + reader.notes
    if source.one_document:
        if packing is False:
            raise DataOptionError("packing", packing, "left out for a text file (one document)")
        pieces = packed(documents, None, length, None)
        samples = [pieces[index] for index in shuffled(len(pieces), seed)[:count]]
    elif packing:
        samples = packed(documents, count, length, reader.separator)
    else:
        samples, cut = truncated(documents, count, length)
        notes += _about_cutting(cut, len(samples), length)
    if not samples:
        raise EmptyDataError(source.name, "has only empty records")
    return samples, notes


def truncated(documents: Iterable[Sample], count: int, length: int) -> tuple[list[Sample], int]:
    """Take the beginnings of the first documents.

    :return: the samples, and how many of them were cut off
    """
    taken = list(islice(documents, count))
    return [ids[:length] for ids in taken], sum(len(ids) > length for ids in taken)


def packed(
    documents: Iterable[Sample], count: int | None, length: int, separator: int | None
) -> list[Sample]:
    """Join documents and cut the whole into pieces of exactly ``length`` tokens.

    What remains at the end is shorter and is dropped, unless it is all there is.

    :param count: how many pieces are wanted; None for all
    :param separator: the token put between two documents, if the first does not end with it

    >>> packed([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], None, 2, separator=0)
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
    whole = torch.cat(joined)
    pieces = list(torch.split(whole, length))
    if len(pieces) > 1 and len(pieces[-1]) < length:
        pieces.pop()
    return pieces[:count]


def _separated(documents: Iterable[Sample], separator: int | None) -> Iterator[Sample]:
    last = separator
    for ids in documents:
        if separator is not None and last != separator:
            yield torch.tensor([separator])
        yield ids
        last = int(ids[-1])


def _about_cutting(cut: int, samples: int, length: int) -> tuple[str, ...]:
    if not cut:
        return ()
    return (
        f"{cut} of {samples} samples are longer than max_seq_length={length} and are cut off "
        "there; packing=True uses all of a text.",
    )
