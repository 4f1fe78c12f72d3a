"""Data that cannot be used: each case has its error, which says where and what to do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader
from words import byte_tokenizer

from calipers.calibration.data import calibration_batches
from calipers.errors import CalipersError, ConfigurationError, DataError

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

RECORD = (
    "A record is a text, a list of token ids, a chat (a list of messages with role and content), "
    "or an object with one of them in a column."
)
CHAT = [{"role": "user", "content": "hello"}]


def refused(
    error: type[CalipersError], text: str, dataset: Any, tokenizer: Any = None, **options: Any
) -> None:
    """The data is refused with a message that begins with the text."""
    with pytest.raises(error, match="^" + re.escape(text)) as caught:
        calibration_batches(dataset, tokenizer or byte_tokenizer(), **options)
    assert caught.value.exit_code == 2
    assert type(caught.value) is error


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nothing.txt"
    text = f"The data file '{path}' does not exist. A text itself is given in a list: [text]."
    refused(DataError, text, path)
    refused(DataError, "The data file 'aaaa", "a" * 5000)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet"])
def test_an_empty_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    text = f"The data file '{path}' is empty: there is nothing to run the model on."
    refused(DataError, text, path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", "\n \n"), ("a.json", "[]"), ("b.txt", " \n\n")]
)
def test_a_file_without_records(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    refused(DataError, f"The data file '{path}' ", path)


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    refused(DataError, f"The data file '{path}' is empty", path)


@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [(b"ab\xffcd", "0xff", 2), ("aé".encode("latin-1"), "0xe9", 1), (b"a\0b", "0x00", 1)],
)
def test_a_file_that_is_not_text(content: bytes, byte: str, offset: int, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    text = f"The data file '{path}' is not UTF-8 text: byte {byte} at offset {offset} of the file."
    refused(DataError, text, path)
    path = path.with_suffix(".json")
    path.write_bytes(content)
    refused(DataError, f"The data file '{path}' is not UTF-8 text: byte {byte}", path)


def test_a_line_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    text = f"'{path}', line 2 is not UTF-8 text: byte 0xff at offset 24 of the file."
    refused(DataError, text, path)


def test_broken_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": }\n')
    text = f"'{path}', line 3 is not valid JSON: Expecting value at column 10. Correct or remove it"
    refused(DataError, text, path)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text" "b"}]')
    text = f"'{path}', line 2 is not valid JSON: Expecting ':' delimiter at column 9."
    refused(DataError, text, path)


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("no magic here")
    refused(DataError, f"The data file '{path}' is not a Parquet file: ArrowInvalid: ", path)


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("anything")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    text = (
        "Reading a Parquet file needs the package pyarrow, which is not installed. "
        "Install it with pip install 'calipers[data]'."
    )
    refused(DataError, text, path)
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = "Reading a folder of data needs the package datasets"
    refused(DataError, text, tmp_path)


def test_a_record_without_text(tmp_path: Path) -> None:
    records = [{"text": "a", "id": 1}, {"id": 2}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    problem = "has nothing in 'text' (it has: "
    refused(DataError, f"'{path}', line 2 {problem}id). {RECORD}", path)
    refused(DataError, f"item 1 {problem}id)", records)
    rows = datasets.Dataset.from_list(records)
    refused(DataError, f"row 1 {problem}text, id)", rows)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    refused(DataError, f"'{path}', row 1 {problem}text)", path)


def test_columns_among_which_the_text_is_not_found(tmp_path: Path) -> None:
    record = {"title": "a", "body": "b", "n": 1}
    listing = "Columns: title, body, n. Name the one to read with text_column=…"
    text = f"item 0: no column is known to hold the text. {listing}"
    refused(DataError, text, [record])
    text = f"item 0: there is no column 'bodi'. Did you mean 'body'? {listing}"
    refused(DataError, text, [record], text_column="bodi")
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    refused(DataError, f"'{path}', row 0: no column is known", path)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (3, "is of type int"),
        (None, "is of type NoneType"),
        (b"abc", "is of type bytes"),
        ([1.5, 2.0], "is a list of float, not of whole numbers"),
        (["a", "b"], "is a list of str, not of whole numbers"),
        ([[1, 2], [3, 4]], "is a list of list, not of whole numbers"),
        ([1, "a"], "is a list of int and str, not of whole numbers"),
        (torch.tensor(3), "is a Tensor of shape ()"),
        (torch.tensor([0.5]), "is a Tensor of torch.float32, not of whole numbers"),
        ({"prompt": "a", "completion": 3}, "has prompt and completion of types str and int"),
        ({"role": "user", "content": "a"}, "is a single message of a chat; put the chat in a list"),
        (
            {"input_ids": [1, 2], "attention_mask": [1]},
            "has 2 input_ids and an attention_mask of 1",
        ),
        ([{"speaker": "a"}], "has a message without a role (it has: speaker)"),
    ],
)
def test_records_of_no_use(record: Any, problem: str) -> None:
    refused(DataError, f"item 0 {problem}", [record], byte_tokenizer(chat=True))
    with pytest.raises(DataError, match=re.escape(RECORD)):
        calibration_batches([record], byte_tokenizer(chat=True))


@pytest.mark.parametrize(
    "dataset",
    [[], (), iter([]), torch.zeros(0, 4, dtype=torch.int64), datasets.Dataset.from_list([])],
)
def test_an_empty_dataset(dataset: Any) -> None:
    with pytest.raises(DataError, match=r"^The .* is empty: there is nothing to run"):
        calibration_batches(dataset)


@pytest.mark.parametrize("dataset", [["", " "], [[], []], [{"text": ""}], [torch.tensor([])]])
@pytest.mark.parametrize("packing", [True, False])
def test_only_empty_records(dataset: Any, packing: bool) -> None:
    text = "The dataset has only empty records: there is nothing to run the model on."
    refused(DataError, text, dataset, byte_tokenizer(bos=True), packing=packing)


def test_an_empty_dataset_is_refused_on_every_rank() -> None:
    refused(DataError, "The dataset has only", [""], rank=2, world_size=4)


def test_batches_that_are_all_padding() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    masks = [torch.tensor([[1, 1, 1], [0, 0, 0]]), torch.zeros(2, 3)]
    given = [{"input_ids": ids, "attention_mask": mask} for mask in masks]
    text = "Batch 1 is all padding: its attention_mask of shape (2, 3) is zero everywhere."
    refused(DataError, text, DataLoader(given, batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"labels": torch.ones(2, 3)}, "has no input_ids (it has: labels)"),
        ({"input_ids": torch.ones(2, 3)}, "has input_ids of shape (2, 3), not of whole numbers"),
        ({"input_ids": torch.ones(2, 3, 1, dtype=torch.int64)}, "has input_ids of shape (2, 3, 1)"),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 4)},
            "has input_ids of shape (2, 3) and an attention_mask of shape (2, 4)",
        ),
        (["a", "b"], "has input_ids of list, not of whole numbers"),
    ],
)
def test_batches_that_are_none(batch: Any, problem: str) -> None:
    good = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    refused(DataError, f"Batch 1 {problem}. A batch is a dict with input_ids", [good, batch])


@pytest.mark.parametrize(("wrong", "size"), [(-1, None), (-1, 100), (100, 100), (5000, 100)])
def test_token_ids_outside_the_vocabulary(wrong: int, size: int | None) -> None:
    allowed = "0 and up" if size is None else "0 to 99"
    end = f"Allowed token ids: whole numbers, {allowed}. Does the tokenizer belong to this model?"
    data = [[1, 2], [3, wrong, 5]]
    text = f"item 1 has the token id {wrong} at position 1. {end}"
    refused(DataError, text, data, vocab_size=size)
    batch = {"input_ids": torch.tensor([[1, 2], [3, wrong]])}
    text = f"Batch 0 has the token id {wrong} at row 1, position 1. {end}"
    refused(DataError, text, [batch], vocab_size=size)


def test_a_tokenizer_of_another_model() -> None:
    refused(DataError, "item 0 has the token id 64 at position 0.", ["abc"], vocab_size=50)


@pytest.mark.parametrize("record", ["a", CHAT, {"text": "a"}])
def test_text_without_a_tokenizer(record: Any) -> None:
    with pytest.raises(DataError, match=r"^item 0 is text, and no tokenizer was given\."):
        calibration_batches([record])


def test_chats_that_are_no_text_without_a_template() -> None:
    text = "item 0 is a chat, and the tokenizer has no chat template for messages that are not"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    refused(DataError, text, [parts])


def test_chats_that_the_template_refuses() -> None:
    text = "item 0 is a chat, and the chat template refused it: no tools here. Use the tokenizer"
    tools = [[{"role": "tool", "content": "a"}]]
    refused(DataError, text, tools, byte_tokenizer(chat=True))


@pytest.mark.parametrize("name", ["num_samples", "max_seq_length", "batch_size", "world_size"])
@pytest.mark.parametrize("value", [0, -3, 1.5, None, True])
def test_numbers_below_one(name: str, value: Any) -> None:
    text = f"{name}={value!r} is not allowed. Allowed: a whole number, 1 or more."
    refused(ConfigurationError, text, [[1]], **{name: value})


def test_other_options_out_of_their_domain(tmp_path: Path) -> None:
    text = "rank=2 is not allowed. Allowed: 0 to 1, below world_size."
    refused(ConfigurationError, text, [[1]], rank=2, world_size=2)
    text = "padding_side='top' is not allowed. Allowed: 'right' or 'left'."
    refused(ConfigurationError, text, [[1]], padding_side="top")
    text = "packing=True has no meaning for batches that are ready-made. Leave it out."
    refused(ConfigurationError, text, [{"input_ids": torch.ones(1, 1).long()}], packing=True)
    path = tmp_path / "a.txt"
    path.write_text("text")
    text = "packing=False has no meaning for a text file (one document). Leave it out."
    refused(ConfigurationError, text, path, packing=False)


class Frame:
    """What a data frame looks like from here."""

    def to_dict(self) -> dict[str, list[str]]:
        return {"text": ["a"]}


@pytest.mark.parametrize(
    ("dataset", "what", "advice"),
    [
        (7, "of type int", ""),
        (None, "of type NoneType", ""),
        (b"text", "of type bytes", ""),
        ({"text": ["a"]}, "of type dict (its keys: text)", ""),
        ({"b", "a"}, "of type set", " A set has no order of its own: give a list."),
        (Frame(), "of type Frame", " Of a data frame, give its records: frame.to_dict('records')."),
        (torch.arange(3), "a Tensor of shape (3,)", " One row of token ids is given as ids[None]."),
        (torch.ones(1, 2, 3), "a Tensor of shape (1, 2, 3)", ""),
    ],
)
def test_datasets_of_unknown_type(dataset: Any, what: str, advice: str) -> None:
    refused(DataError, f"A dataset cannot be {what}. Allowed: the path of a", dataset)
    with pytest.raises(DataError) as caught:
        calibration_batches(dataset)
    assert str(caught.value).endswith(f"iterable of batches with input_ids.{advice}")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    text = f"The data set '{tmp_path}' cannot be read: The directory at {tmp_path} doesn't contain"
    refused(DataError, text, tmp_path)


def test_splits(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "a"}])
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    text = "The dataset has several splits: train, test. Choose one of them: dataset['train']."
    refused(DataError, text, splits)
    splits.save_to_disk(tmp_path / "saved")
    text = text.replace("dataset['train']", f"'{tmp_path / 'saved'}:train'")
    refused(DataError, text, tmp_path / "saved")
