from __future__ import annotations

import pytest

from calipers.errors import RecipeError
from calipers.recipes.reading import read_document

TEXT = """\
a:
  - x: 1

    y: {z: [2,
      3]}
b: text
"""


def test_every_key_and_item_has_its_line() -> None:
    document = read_document(TEXT, "file")
    assert document.data == {"a": [{"x": 1, "y": {"z": [2, 3]}}], "b": "text"}
    assert document.lines == {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 0, "x"): 2,
        ("a", 0, "y"): 4,
        ("a", 0, "y", "z"): 4,
        ("a", 0, "y", "z", 0): 4,
        ("a", 0, "y", "z", 1): 5,
        ("b",): 6,
    }


def test_the_nearest_line() -> None:
    document = read_document(TEXT, "file")
    assert document.line_of(("a", 0, "y", "nothing")) == 4
    assert document.line_of(("b", "c", "d")) == 6
    assert document.line_of(("a", 0, "z")) == 4, "a key deeper inside is found by its name"
    assert document.line_of(()) is None
    assert str(document.error("wrong.", ("b",))) == "file, line 6: wrong."


def test_anchors_and_merges() -> None:
    text = "base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\nagain: *b"
    data = read_document(text, "file").data
    assert data == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}, "again": {"x": 1, "y": 2}}


def test_a_merge_that_is_used_twice() -> None:
    text = "base: &b {x: 1}\nmore: &m\n  <<: *b\n  x: 2\nagain: *m"
    data = read_document(text, "file").data
    assert data == {"base": {"x": 1}, "more": {"x": 2}, "again": {"x": 2}}


def test_json_with_tabs() -> None:
    assert read_document('{\n\t"a":\t[1]\n}', "file").data == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "file, line 3: the key 'a' stands twice, first in line 1."),
        ("a: 1\nb: [", "file, line 2: this is no YAML: "),
        ("a: &x [*x]", "file, line 1: an anchor contains itself."),
        ("? [1, 2]\n: 3", "file, line 1: a key must be a word"),
        ("a: 1\n---\nb: 2", "file, line 2: this is no YAML: but found another document"),
        ("a:\n  !!python/object/apply:os.system [ls]", "file, line 2: the tag '!!python/object/"),
        ("a: !!python/name:os.system", "file, line 1: this is no YAML: could not determine a"),
        ("a: 1\nb: 2001-99-99", "file, line 2: '2001-99-99' cannot be read: "),
        ("a: \x01", "file: this is no YAML: "),
        ("[" * 100_000, "file: is nested too deeply."),
        ("a: !mine {b: 1}", "file, line 1: the tag '!mine' is refused"),
    ],
)
def test_bad_text(text: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_document(text, "file")
    assert str(caught.value).startswith(problem)


def test_anchors_that_multiply_are_stopped() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, 8):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    with pytest.raises(RecipeError, match="more than 100000 entries"):
        read_document("\n".join(lines), "file")


def test_enums_of_the_peer_are_words() -> None:
    tag = "!!python/object/apply:compressed_tensors.quantization.quant_args.QuantizationType"
    assert read_document(f"type: {tag} [\n  int]", "file").data == {"type": "int"}
