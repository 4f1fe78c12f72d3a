"""Questions and answers under the names that data sets give them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from words import BOS, byte_tokenizer, ids_of

from calipers.calibration.data import calibration_batches
from calipers.errors import CalipersWarning, DataError

TOO_LITTLE = pytest.mark.filterwarnings("ignore:.*(samples):calipers.errors.CalipersWarning")
pytestmark = TOO_LITTLE


def read(dataset: Any, *, chat: bool, **options: Any) -> list[list[int]]:
    tokenizer = byte_tokenizer(bos=True, chat=chat)
    found = calibration_batches(dataset, tokenizer, shuffle=False, **options)
    return [batch["input_ids"][0].tolist() for batch in found]


@pytest.mark.parametrize(
    ("record", "chat", "joined"),
    [
        ({"instruction": "ab", "output": "cd"}, "user:ab;assistant:cd;", "ab\n\ncd"),
        ({"prompt": "ab", "response": "cd"}, "user:ab;assistant:cd;", "ab\n\ncd"),
        ({"prompt": "ab", "completion": " cd"}, "user:ab;assistant: cd;", "ab cd"),
        ({"question": "ab", "answer": "cd", "id": "1"}, "user:ab;assistant:cd;", "ab\n\ncd"),
        ({"question": "ab", "response": "cd"}, "user:ab;assistant:cd;", "ab\n\ncd"),
        ({"input": "ab", "output": "cd"}, "user:ab;assistant:cd;", "ab\n\ncd"),
        (
            {"output": "ef", "text": "no", "input": "cd", "instruction": "ab"},
            "user:ab\n\ncd;assistant:ef;",
            "ab\n\ncd\n\nef",
        ),
        (
            {"instruction": "ab", "context": "cd", "response": "ef", "category": "x"},
            "user:ab\n\ncd;assistant:ef;",
            "ab\n\ncd\n\nef",
        ),
        (
            {"instruction": "ab", "input": "", "output": "cd"},
            "user:ab;assistant:cd;",
            "ab\n\ncd",
        ),
        (
            {"instruction": "ab", "input": None, "output": "cd"},
            "user:ab;assistant:cd;",
            "ab\n\ncd",
        ),
        ({"question": "ab", "answer": ""}, "user:ab;", "ab"),
    ],
    ids=lambda record: "-".join(record) if isinstance(record, dict) else "",
)
def test_a_question_and_its_answer(record: Any, chat: str, joined: str, tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text(json.dumps(record))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), table)
    for dataset in ([record], lines, table, datasets.Dataset.from_list([record])):
        assert read(dataset, chat=True) == [[BOS, *ids_of(chat)]]
        assert read(dataset, chat=False) == [[BOS, *ids_of(joined)]]


def test_later_records_may_leave_out_what_is_added() -> None:
    records = [
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "d", "output": "e"},
    ]
    assert read(records, chat=False) == [[BOS, *ids_of(text)] for text in ("a\n\nb\n\nc", "d\n\ne")]
    with pytest.raises(DataError, match=r"^item 1 has nothing in 'output' \(it has: instruction"):
        read([records[0], {"instruction": "d"}], chat=False)


def test_questions_and_answers_without_a_letter_are_passed_over() -> None:
    records = [{"question": " ", "answer": "\n"}, {"question": "ab", "answer": "cd"}]
    assert read(records, chat=True) == [[BOS, *ids_of("user:ab;assistant:cd;")]]


@pytest.mark.parametrize(
    "columns",
    [("prompt", "question", "answer"), ("instruction", "output", "response"), ("story", "title")],
)
def test_which_it_is_must_be_said(columns: tuple[str, ...]) -> None:
    record = dict.fromkeys(columns, "ab")
    said = (
        f"item 0: no column is known to hold the text. Columns: {', '.join(columns)}. Name the one "
        "to read with text_column=…"
    )
    with pytest.raises(DataError, match=re.escape(said)):
        read([record], chat=True)
    assert read([record], chat=True, text_column=columns[-1]) == [[BOS, *ids_of("ab")]]


def test_an_answer_that_is_no_text() -> None:
    with pytest.raises(DataError, match="item 0 has question and answer of types str and int"):
        read([{"question": "ab", "answer": 3}], chat=True)


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_chats_in_both_spellings(column: str) -> None:
    shared = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "ab"},
        {"from": "gpt", "value": "cd"},
    ]
    roles = ("system", "user", "assistant")
    usual = [
        {"role": role, "content": turn["value"]} for role, turn in zip(roles, shared, strict=True)
    ]
    for chat in (shared, usual):
        found = read([{column: chat}], chat=True)
        assert found == [[BOS, *ids_of("system:s;user:ab;assistant:cd;")]]
        with pytest.warns(CalipersWarning, match=r"^The tokenizer has no chat template: the mess"):
            found = read([{column: chat}], chat=False)
        assert found == [[BOS, *ids_of("s\n\nab\n\ncd")]]
