"""Of a very long text only the beginning is tokenized, and its tokens are those of the whole."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from words import byte_tokenizer

from calipers.calibration.data import calibration_batches
from calipers.calibration.data.records import RecordTokenizer
from calipers.demo import MODEL
from calipers.errors import CalipersWarning

SHARED = Path(os.environ.get("CALIPERS_SHARED", Path(__file__).parents[3] / "shared"))
STORIES = SHARED / "models" / "stories15M"
NEEDS_STORIES = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is not there")
TOKENIZERS = [
    pytest.param(MODEL, id="demo"),
    pytest.param(STORIES, marks=NEEDS_STORIES, id="stories15M"),
]
ODD = [
    "Once upon a time, ",
    "there was\n\n\n\n a cat.  ",
    "\t \t\r\n",
    " \u00a0\u2003\u3000\u200b",
    "e\u0301\u0302\u0323 a\u0308" * 3,
    "ﬁ ① ％ Å ẛ̣",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "日本語の文章。",
    "שלום עליכם ",
    "x" * 40,
    "=" * 90,
    " " * 70,
    "\n" * 33,
    "<s></s> [INST] <unk>",
    "ΣΑΣ İstanbul ",
    "0123456789" * 5,
]


def odd_text(seed: int, size: int) -> str:
    chosen = random.Random(seed)
    text = ""
    while len(text) < size:
        text += chosen.choice(ODD)
    return text


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def tokenizers() -> dict[Path, Any]:
    paths = [path for path in (MODEL, STORIES) if path.exists()]
    return {path: AutoTokenizer.from_pretrained(path) for path in paths}


@pytest.mark.parametrize("path", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        *(odd_text(seed, 30_000) for seed in range(6)),
        "a" * 30_000,
        " " * 20_000 + "end" * 4_000,
        "x" + "\n \n" * 10_000,
    ],
    ids=lambda text: f"{text[:8]!r}…",
)
def test_tokens_are_those_of_the_whole(text: str, path: Path, tokenizers: dict[Path, Any]) -> None:
    tokenizer = Counting(tokenizers[path])
    encoder = RecordTokenizer(tokenizer)
    whole = encoder.token_ids(text, "here")
    for enough in (1, 3, 50, 400):
        tokenizer.characters = 0
        found = encoder.token_ids(text, "here", enough)
        assert len(found) > enough
        torch.testing.assert_close(found, whole[: len(found)], rtol=0, atol=0)
        assert 0 < tokenizer.characters < 2 * len(text)


@pytest.mark.parametrize("packing", [False, True])
def test_a_long_line_is_not_tokenized_to_its_end(tmp_path: Path, packing: bool) -> None:
    lines = [odd_text(seed, 400_000 if seed == 1 else 2_000) for seed in range(4)]
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    options: Any = {"num_samples": 3, "max_seq_length": 100, "packing": packing, "shuffle": False}
    with pytest.warns(CalipersWarning) as told:
        expected = calibration_batches(
            [line[:20_000] for line in lines], byte_tokenizer(), **options
        )
    tokenizer = Counting(byte_tokenizer())
    with pytest.warns(CalipersWarning) as told_again:
        found = calibration_batches(path, tokenizer, **options)
    assert [str(each.message) for each in told] == [str(each.message) for each in told_again]
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours["input_ids"], theirs["input_ids"], rtol=0, atol=0)
    assert tokenizer.characters < 20_000


def test_a_text_of_few_tokens_is_tokenized_until_there_are_enough() -> None:
    made = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Counting(PreTrainedTokenizerFast(tokenizer_object=made))
    text = ("word" + " " * 200) * 2_000
    found = RecordTokenizer(tokenizer).token_ids(text, "here", 10)
    assert found.tolist() == [0] * 11
    assert 20_000 < tokenizer.characters < len(text) / 4
