"""Samples and batches: what is taken, cut, packed, padded and dealt to ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from words import BOS, EOS, PAD, byte_tokenizer, ids_of

from calipers.calibration.data import Batches, calibration_batches
from calipers.errors import CalipersWarning, ConfigurationError, DataError

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=30)


def rows(batches: Batches) -> list[list[int]]:
    """The samples, without padding, by means of the mask."""
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_a_list_of_texts_is_tokenized_cut_and_padded() -> None:
    texts = ["one", "three", "seventeen"]
    batches = calibration_batches(
        texts, byte_tokenizer(pad=True), batch_size=2, max_seq_length=6, shuffle=False
    )
    first, second = batches
    expected = [[*ids_of("one"), PAD, PAD], ids_of("three")]
    assert first["input_ids"].tolist() == expected
    assert first["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert second["input_ids"].tolist() == [ids_of("sevent")]
    assert (len(batches), batches.num_samples, batches.num_tokens) == (2, 3, 14)
    for batch in batches:
        assert set(batch) == {"input_ids", "attention_mask"}
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_padding_on_the_left() -> None:
    batches = calibration_batches(
        [[1, 2, 3], [4]], batch_size=2, padding_side="left", shuffle=False
    )
    (batch,) = batches
    assert batch["input_ids"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("special", "vocab_size", "expected"),
    [
        ({"pad": True, "eos": True}, None, PAD),
        ({"eos": True}, None, EOS),
        ({}, None, 0),
        ({"pad": True, "eos": True}, EOS + 1, EOS),
        ({"pad": True, "eos": True}, EOS, 0),
    ],
)
def test_padding_is_a_token_that_the_model_has(
    special: dict[str, bool], vocab_size: int | None, expected: int
) -> None:
    (batch,) = calibration_batches(
        ["aa", "a"],
        byte_tokenizer(**special),
        batch_size=2,
        shuffle=False,
        vocab_size=vocab_size,
    )
    assert batch["input_ids"][1, 1] == expected


def test_batches_can_be_gone_through_again_and_are_not_changed_by_it() -> None:
    batches = calibration_batches([[1, 2], [3, 4]], batch_size=1)
    for batch in batches:
        batch.clear()
    assert Counter(map(tuple, rows(batches))) == {(1, 2): 1, (3, 4): 1}
    with pytest.raises(FrozenInstanceError):
        batches.batches = ()  # type: ignore[misc]


def test_special_tokens_are_those_of_the_tokenizer_and_come_once() -> None:
    plain = calibration_batches(["ab"], byte_tokenizer(bos=True))
    assert rows(plain) == [[BOS, *ids_of("ab")]]
    chat = [{"role": "user", "content": "ab"}]
    chats = calibration_batches([chat], byte_tokenizer(bos=True, chat=True))
    assert rows(chats) == [[BOS, *ids_of("user:ab;")]]


def test_empty_texts_are_passed_over() -> None:
    texts = ["", "a", "  \n", "b", "c"]
    batches = calibration_batches(texts, byte_tokenizer(bos=True), num_samples=2, shuffle=False)
    assert rows(batches) == [[BOS, *ids_of("a")], [BOS, *ids_of("b")]]


def test_packing_puts_the_end_of_text_between_documents() -> None:
    batches = calibration_batches(
        ["abc", "de", "f"],
        byte_tokenizer(eos=True),
        packing=True,
        max_seq_length=4,
        shuffle=False,
        batch_size=8,
    )
    assert rows(batches) == [[*ids_of("abc"), EOS], [*ids_of("de"), EOS, *ids_of("f")]]


def test_packing_does_not_repeat_an_end_of_text_nor_end_with_one() -> None:
    data = [[1, EOS], [2, 3], [4]]
    batches = calibration_batches(
        data, byte_tokenizer(eos=True), packing=True, max_seq_length=2, shuffle=False
    )
    assert rows(batches) == [[1, EOS], [2, 3], [EOS, 4]]


def test_packing_keeps_a_rest_that_is_all_there_is() -> None:
    batches = calibration_batches([[1, 2], [3]], packing=True, max_seq_length=8, shuffle=False)
    assert rows(batches) == [[1, 2, 3]]


def test_packing_takes_no_more_than_asked_for() -> None:
    batches = calibration_batches(
        [[1, 2, 3], [4, 5, 6, 7, 8]], packing=True, max_seq_length=2, num_samples=2, shuffle=False
    )
    assert rows(batches) == [[1, 2], [3, 4]]


@given(DOCUMENTS, st.integers(1, 9))
def test_packing_loses_nothing_but_the_rest(documents: list[list[int]], length: int) -> None:
    batches = calibration_batches(
        documents, packing=True, max_seq_length=length, num_samples=1000, shuffle=False
    )
    everything = [token for document in documents for token in document]
    kept = len(everything) // length * length or len(everything)
    assert [token for row in rows(batches) for token in row] == everything[:kept]
    assert batches.num_tokens == kept


@given(DOCUMENTS, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.sampled_from([1, 3, 50]))
def test_all_ranks_together_have_what_one_process_has(
    documents: list[list[int]], ranks: int, batch_size: int, packing: bool, count: int
) -> None:
    options: dict[str, Any] = {"max_seq_length": 7, "packing": packing, "num_samples": count}
    alone = rows(calibration_batches(documents, **options))
    parts = [
        calibration_batches(
            documents, rank=rank, world_size=ranks, batch_size=batch_size, **options
        )
        for rank in range(ranks)
    ]
    dealt = [rows(part) for part in parts]
    assert dealt == [alone[rank::ranks] for rank in range(ranks)]
    assert sum(part.num_samples for part in parts) == len(alone)
    assert sum(part.num_tokens for part in parts) == sum(map(len, alone))
    assert len({part.warnings for part in parts}) == 1


@given(DOCUMENTS, st.integers(0, 3))
def test_shuffling_is_a_permutation_that_the_seed_decides(
    documents: list[list[int]], seed: int
) -> None:
    found = rows(calibration_batches(documents, seed=seed))
    assert Counter(map(tuple, found)) == Counter(map(tuple, documents))
    assert found == rows(calibration_batches(documents, seed=seed, batch_size=3))
    fewer = rows(calibration_batches(documents, seed=seed, num_samples=2))
    assert fewer == found[:2]


def test_seeds_differ_and_samples_come_from_everywhere() -> None:
    data = [[number] for number in range(400)]
    taken = [rows(calibration_batches(data, seed=seed, num_samples=40)) for seed in (0, 1)]
    assert taken[0] != taken[1]
    assert all(any(row[0] >= 300 for row in part) for part in taken)
    in_order = calibration_batches(data, shuffle=False, num_samples=40)
    assert rows(in_order) == data[:40]


@given(DOCUMENTS, st.integers(1, 6), st.sampled_from(["left", "right"]))
def test_masks_sum_to_lengths(documents: list[list[int]], batch_size: int, side: Any) -> None:
    batches = calibration_batches(
        documents, batch_size=batch_size, padding_side=side, shuffle=False, max_seq_length=8
    )
    lengths = [int(row) for batch in batches for row in batch["attention_mask"].sum(1)]
    assert lengths == [min(len(document), 8) for document in documents]
    for batch in batches:
        assert batch["input_ids"].shape[1] == batch["attention_mask"].sum(1).max()


def test_a_rank_may_be_left_without_samples() -> None:
    batches = calibration_batches([[1, 2]], rank=2, world_size=3)
    assert (len(batches), batches.num_samples, batches.num_tokens) == (0, 0, 0)
    assert list(batches) == []


def test_pieces_of_a_text_file_come_from_everywhere(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + number // 10) for number in range(260))
    path = tmp_path / "letters.txt"
    path.write_text(text)
    batches = calibration_batches(path, byte_tokenizer(eos=True), max_seq_length=10)
    pieces = [ids_of(chr(ord("a") + number) * 10) for number in range(26)]
    assert sorted(rows(batches)) == sorted(pieces) != rows(batches)
    few = calibration_batches(path, byte_tokenizer(), max_seq_length=10, num_samples=5)
    assert rows(few) == rows(batches)[:5]


def test_too_little_data_is_said() -> None:
    with pytest.warns(CalipersWarning) as caught:
        batches = calibration_batches([[1] * 9, [2] * 3], max_seq_length=5, num_samples=4)
    assert batches.warnings == (
        "1 of 2 samples are longer than max_seq_length=5 and are cut off there; packing=True "
        "uses all of a text.",
        "The data has 2 samples; 4 were asked for (num_samples).",
        "2 samples with 8 tokens: static ranges from so little data are unreliable. Use at "
        "least 32 samples and 4096 tokens.",
    )
    assert tuple(str(warning.message) for warning in caught) == batches.warnings
    assert {Path(warning.filename).name for warning in caught} == {"test_data.py"}


def test_enough_data_is_not_talked_about_and_other_ranks_are_silent() -> None:
    plenty = torch.zeros(32, 128, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration_batches(plenty, num_samples=32, max_seq_length=128).warnings == ()
        assert calibration_batches([[1], [2]], rank=1, world_size=2).warnings != ()


@pytest.mark.parametrize(("count", "length"), [(31, 1000), (32, 127)])
def test_what_is_little(count: int, length: int) -> None:
    with pytest.warns(CalipersWarning, match=f"^{count} samples with {count * length} tokens"):
        calibration_batches(torch.zeros(count, length, dtype=torch.int64), num_samples=count)


@given(DOCUMENTS)
def test_samples_of_like_length_share_batches(documents: list[list[int]]) -> None:
    batches = calibration_batches(documents, batch_tokens=16, num_samples=len(documents))
    assert Counter(map(tuple, rows(batches))) == Counter(map(tuple, documents))
    for batch in batches:
        lengths = batch["attention_mask"].sum(1)
        assert batch["input_ids"].numel() <= 16
        assert lengths.max() <= 1.125 * lengths.min()
    lengths = [len(row) for row in rows(batches)]
    if len(set(lengths)) == 1 and lengths[0] <= 8:  # nothing keeps them apart but the size
        assert len(batches) == -(-len(lengths) // (16 // lengths[0]))


# Samples that were taken before can be passed over

NUMBERED = [[number] * 8 for number in range(1, 51)]


def samples_with(**options: Any) -> list[tuple[int, ...]]:
    common: dict[str, Any] = {"max_seq_length": 8, "seed": 5, "use": "evaluation"}
    batches = calibration_batches(NUMBERED, **common, **options)
    return [tuple(batch["input_ids"][0].tolist()) for batch in batches]


@pytest.mark.parametrize("packing", [None, True])
def test_what_follows_is_what_one_call_would_have_taken_next(packing: bool | None) -> None:
    everything = samples_with(num_samples=50, packing=packing)
    assert samples_with(num_samples=20, packing=packing) == everything[:20]
    assert samples_with(num_samples=20, skip=20, packing=packing) == everything[20:40]
    assert samples_with(num_samples=50, skip=20, packing=packing) == everything[20:]
    assert len(set(everything)) == 50


def test_skip_of_too_many_and_unsupported_modules() -> None:
    with pytest.raises(DataError, match="has 50 samples, and skip=50 passes over all of them"):
        samples_with(skip=50)
    with pytest.raises(ConfigurationError, match=r"skip=-1 is not allowed\. Allowed: a whole num"):
        samples_with(skip=-1)
    ready = [{"input_ids": torch.ones(1, 8, dtype=torch.int64)}] * 3
    with pytest.raises(ConfigurationError, match="skip=1 has no meaning for batches that"):
        calibration_batches(iter(ready), skip=1, use="evaluation")
