"""Tokens that the data does not mark run through the model, and count nowhere."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from families import build, saved
from shell import run
from torch import Tensor
from words import byte_tokenizer, ids_of

import calipers
from calipers import Measurements
from calipers.calibration.data import calibration_batches, counted_tokens
from calipers.errors import CalipersWarning, ConfigurationError, DataError

FEW = pytest.mark.filterwarnings(
    "ignore:.*(samples with|were asked for|samples were evaluated|longer than).*"
)
LENGTHS = (19, 7, 24, 11)
IDS = [
    torch.randint(260, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS
]
MARKS = [[int(place % 3 > 0 and place > 4) for place in range(n)] for n in LENGTHS]
LABELS = [
    [token if mark else -100 for token, mark in zip(ids, marks, strict=True)]
    for ids, marks in zip(IDS, MARKS, strict=True)
]
COLUMNS: dict[str, Any] = {
    "assistant_masks": MARKS,
    "assistant_mask": [[bool(mark) for mark in marks] for marks in MARKS],
    "loss_mask": MARKS,
    "labels": LABELS,
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }};"
    "{% endgeneration %}{% else %}{{ message['content'] }};{% endif %}{% endfor %}"
)
NOTE = (
    "The data has masks of tokens (assistant_masks, loss_mask, or labels of -100) that are not "
    "used: all tokens count. mask='assistant' counts only what they mark."
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "you"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "now"},
]


def records(column: str) -> list[dict[str, Any]]:
    """Rows with padding before them, of which the mask says that it counts."""
    padding = {"input_ids": [3, 3], "attention_mask": [0, 0], "labels": [3, 3]}
    return [
        {
            "input_ids": padding["input_ids"] + ids,
            "attention_mask": [0, 0] + [1] * len(ids),
            column: padding.get(column, [1, 1]) + marks,
        }
        for ids, marks in zip(IDS, COLUMNS[column], strict=True)
    ]


def batches(column: str) -> list[dict[str, Tensor]]:
    """The same rows, two in a batch, as a collator of a trainer makes them."""
    found = []
    for pair in (records(column)[:2], records(column)[2:]):
        longest = max(len(each["input_ids"]) for each in pair)
        batch = {}
        for name in pair[0]:
            fill = -100 if name == "labels" else 0
            rows = [each[name] + [fill] * (longest - len(each[name])) for each in pair]
            batch[name] = torch.tensor(rows)
        found.append(batch)
    return found


@torch.no_grad()
def marked_inputs(model: Any, module: str) -> Tensor:
    """The tokens that are marked, of whole samples that ran one by one."""
    seen: list[Tensor] = []
    handle = model.get_submodule(module).register_forward_pre_hook(
        lambda _, args: seen.append(*args)
    )
    for ids in IDS:
        model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    marks = [torch.tensor(each).bool() for each in MARKS]
    return torch.cat([x[0][mark] for x, mark in zip(seen, marks, strict=True)]).double()


def assert_marked_alone_count(found: Measurements, model: Any) -> None:
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        x = marked_inputs(model, module)
        squares: Any = found.get(module, "input", "squares")
        assert squares.num_tokens == len(x) == sum(map(sum, MARKS))
        torch.testing.assert_close(squares._imatrix_sum, x.square().sum(0), rtol=1e-5, atol=1e-7)


@FEW
@pytest.mark.parametrize("make", [records, batches])
@pytest.mark.parametrize("column", COLUMNS)
def test_marked_tokens_alone_count(make: Callable[[str], Any], column: str) -> None:
    model = build()
    for pipeline in ("basic", "sequential"):
        found = calipers.measure(
            model, make(column), mask="assistant", pipeline=pipeline, batch_size=2, progress=False
        )
        assert_marked_alone_count(found, model)
        assert found.info is not None
        assert found.info.tokens == sum(map(sum, MARKS))


@FEW
def test_what_is_predicted_counts_in_evaluations_and_sensitivities() -> None:
    model = build()
    result = calipers.evaluate(model, {}, records("labels"), mask="assistant", progress=False)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.tensor([ids])).logits[0, :-1].double(),
                torch.tensor(labels[1:]),
                reduction="none",
            )[torch.tensor(labels[1:]) != -100]
            for ids, labels in zip(IDS, LABELS, strict=True)
        ]
    assert result.tokens == sum(map(len, losses))
    expected = math.exp(float(torch.cat(losses).mean()))
    assert result.base.perplexity.value == pytest.approx(expected, rel=1e-5)
    found = calipers.measure(
        model, records("labels"), mask="assistant", collect="sensitivity", progress=False
    )
    sensitivity: Any = found.get("lm_head", "weight", "sensitivity")
    assert sensitivity.num_tokens == sum(map(len, losses))


@FEW
def test_the_chat_template_marks_what_the_assistant_says() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    (batch,) = calibration_batches([CHAT], tokenizer, mask="assistant")
    text = "u:hi;a:you;u:bye;a:now;"
    assert batch["input_ids"].tolist() == [ids_of(text)]
    assert batch["attention_mask"].all()
    expected = [int(place in (*range(7, 11), *range(19, 23))) for place in range(len(text))]
    assert counted_tokens(batch).tolist() == [expected]
    # Samples of which nothing counts are passed over, and so is what is cut off.
    others = [
        [{"role": "user", "content": "alone"}],
        CHAT,
        [{**CHAT[0], "content": "x" * 20}, *CHAT],
    ]
    (batch,) = calibration_batches(others, tokenizer, mask="assistant", max_seq_length=15)
    assert counted_tokens(batch).tolist() == [expected[:15]]
    (batch,) = calibration_batches(
        [CHAT, CHAT], tokenizer, mask="assistant", packing=True, max_seq_length=46
    )
    assert counted_tokens(batch).tolist() == [expected * 2]


@FEW
@pytest.mark.parametrize("make", [records, batches])
def test_masks_that_are_not_used_are_told_of(make: Callable[[str], Any]) -> None:
    for column in COLUMNS:
        with pytest.warns(CalipersWarning, match=re.escape(NOTE)) as told:
            found = calibration_batches(make(column), num_samples=4)
        assert sum(str(each.message) == NOTE for each in told) == 1
        assert found.num_tokens == sum(LENGTHS)
    # Padding has no label, nor has the end of a text where it stands for padding.
    ends = [{"input_ids": [5, 6, 1], "labels": [5, 6, -100]}, {"input_ids": [5], "labels": [5]}]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*masks.*")
        calibration_batches(ends, num_samples=2)
        calibration_batches([{"input_ids": [5, 6], "labels": 3}], num_samples=1)


NEXT = (
    ", and mask='assistant' counts only tokens that are marked. Give input_ids with one of "
    "assistant_masks, assistant_mask, loss_mask, labels (-100 where a token does not count) of the "
    "same length, or chats and a tokenizer whose chat template has {% generation %} blocks; or "
    "leave it out, and all tokens count."
)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (["text"], "item 0 has no mask"),
        ([[1, 2]], "item 0 has no mask"),
        ([{"input_ids": [1, 2]}], "item 0 has no mask (it has: input_ids)"),
        (
            [{"input_ids": [1, 2], "loss_mask": [1]}],
            "item 0 has no mask (it has: input_ids, loss_mask)",
        ),
        ([CHAT], "item 0 is a chat whose template has no {% generation %} blocks"),
        ([{"input_ids": torch.ones(1, 2).long()}], "Batch 0 has no mask (it has: input_ids)"),
    ],
)
def test_data_without_masks_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(DataError, match="^" + re.escape(problem + NEXT)):
        calibration_batches(data, byte_tokenizer(chat=True), mask="assistant")


def test_data_of_which_nothing_counts_is_refused() -> None:
    data = {"input_ids": [1, 2], "loss_mask": [0, 0]}
    with pytest.raises(DataError, match="has only records of which no token is marked"):
        calibration_batches([data], mask="assistant")
    with pytest.raises(DataError, match="has only batches of which no token is marked"):
        calibration_batches([{k: torch.tensor([v]) for k, v in data.items()}], mask="assistant")
    with pytest.raises(
        ConfigurationError, match=r"^mask='user' is not allowed\. Allowed: assistant"
    ):
        calipers.measure(build(), [data], mask="user")


def test_the_command_reads_masks_of_files(tmp_path: Path) -> None:
    model = build()
    saved(model, tmp_path / "model")
    rows = records("assistant_masks")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for data in ("rows.jsonl", "rows.parquet"):
        words = ["measure", "model", "--data", data, "-o", f"{data}.safetensors"]
        ended = run(*words, "--mask", "assistant", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert "masks" not in ended.stderr
        assert_marked_alone_count(Measurements.load(tmp_path / f"{data}.safetensors"), model)
    ended = run(*words, "--overwrite", cwd=tmp_path)
    assert "--mask assistant counts only what they mark" in " ".join(ended.stderr.split())
