"""Data files, tokenizers and models that fail deep inside a library: the error names the place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from families import build, token_ids
from words import byte_tokenizer

import calipers
from calipers import errors
from calipers.calibration.data import calibration_batches

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


def refused(kind: type[Exception], text: str, dataset: Any, tokenizer: Any = None) -> None:
    with pytest.raises(kind, match="^" + re.escape(text)) as caught:
        calibration_batches(dataset, tokenizer or byte_tokenizer())
    assert isinstance(caught.value, errors.CalipersError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ("9" * 5000, "Exceeds the limit (4300 digits)"),
    ],
)
def test_json_that_python_does_not_read(line: str, problem: str, tmp_path: Path) -> None:
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(f'{{"text": "a"}}\n{line}\n')
    whole.write_text(line)
    refused(errors.DataError, f"'{lines}', line 2 is not valid JSON: {problem}", lines)
    refused(errors.DataError, f"The data file '{whole}' is not valid JSON: {problem}", whole)


def test_json_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc')
    text = f"'{path}', line 1 is not valid JSON: Unterminated string starting at column 10."
    refused(errors.DataError, text, path)


def test_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc\\ud800"}\n')
    text = f"'{path}', line 1 has half a character (a surrogate) at position 3. A record is "
    refused(errors.DataError, text, path)


def test_token_ids_that_no_integer_holds() -> None:
    refused(errors.DataError, "item 0 is a list of int, not of whole numbers", [[1, 10**30]])


def test_a_parquet_file_with_every_kind_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["hello"] * 50}), path)
    content = path.read_bytes()
    told: dict[type, str] = {}
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        try:
            calibration_batches(path, byte_tokenizer())
        except errors.DataError as error:
            told[type(error)] = str(error)
    assert str(path) in told[errors.DataError]


class FailingTokenizer:
    """Raises what tokenizers raise when the Rust in them panics."""

    class PanicException(BaseException):
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.PanicException("index out of bounds")


def test_a_tokenizer_that_panics() -> None:
    text = "The tokenizer cannot turn item 0 into tokens: PanicException: index out of bounds. "
    refused(errors.DataError, text, ["abc"], FailingTokenizer())


def test_a_tokenizer_that_is_interrupted() -> None:
    """Ctrl-C is nobody's error."""

    class Interrupted:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibration_batches(["abc"], Interrupted())


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_model_that_fails_while_it_runs(pipeline: Any) -> None:
    model = build()
    model.model.layers[1].mlp.act_fn = torch.nn.Linear(3, 3)
    text = "failed while data ran through it: RuntimeError: mat1 and mat2"
    with pytest.raises(errors.ModelRunError, match=text) as told:
        calipers.oneshot(model, "FP8", token_ids(), pipeline=pipeline, progress=False)
    assert told.value.exit_code == 3
