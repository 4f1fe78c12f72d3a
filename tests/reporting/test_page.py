"""The document: self-contained, small, and whatever a file says is text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from report_content import EVIL, content, error_of

from calipers.reporting.page import json_for_script, page

LARGEST = 15_000_000


class Document(HTMLParser):
    """The elements of a document, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._within = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag == "script"
        if self._within:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._within = self._within and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._within:
            self.scripts[-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def text() -> str:
    return page(content())


def test_names_stay_text(text: str) -> None:
    found, harmless = Document(text), Document(page(content(evil=False)))
    assert found.count("script") == harmless.count("script") == 3
    assert found.count("img") == found.count("b") - harmless.count("b") == 0
    handlers = [key for _, attrs in found.elements for key in attrs if key.startswith("on")]
    assert not handlers
    assert "49" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)  # {{ 7 * 7 }}
    data = json.loads(found.scripts[0])
    names = [module["name"] for module in data["modules"]]
    assert names[-3:] == list(EVIL)
    assert not set("<>&\u2028") & set(found.scripts[0])


def test_json_in_a_script() -> None:
    given = {"</script><!--": ["\u2028&\u2029", 1.5, None]}
    assert json.loads(json_for_script(given)) == given
    with pytest.raises(ValueError, match="JSON"):
        json_for_script(float("nan"))


def test_the_policy_allows_these_scripts_and_nothing_else(text: str) -> None:
    found = Document(text)
    (policy,) = (
        str(attrs["content"])
        for tag, attrs in found.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    (allowed,) = re.findall(r"script-src ([^;]*)", policy)
    digests = (hashlib.sha256(script.encode()).digest() for script in found.scripts[1:])
    assert allowed.split() == [f"'sha256-{base64.b64encode(d).decode()}'" for d in digests]
    loaded = {"src", "href", "srcset", "data", "action"}
    for tag, attrs in found.elements:
        addresses = [attrs[key] or "" for key in loaded & attrs.keys()]
        assert all(address.startswith("#") for address in addresses), (tag, attrs)


def test_the_figures_of_the_page() -> None:
    made = content(evil=False)
    data = json.loads(Document(page(made)).scripts[0])
    assert data["kinds"] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert {module["layer"] for module in data["modules"]} == set(range(4))
    rows = data["checkpoints"][1]["rows"]
    for index, module in enumerate(data["modules"]):
        assert rows[module["name"]]["output"] == pytest.approx(error_of(index, 1), rel=1e-3)
    worst = data["checkpoints"][0]["rows"]["model.layers.1.self_attn.v_proj"]
    assert (worst["output"], worst["verdict"]) == (0.5, "hurts")
    assert 'data-module="model.layers.1.self_attn.v_proj"' in page(made)


def test_the_page_of_a_model_with_32_layers_is_small() -> None:
    size = len(page(content(layers=32)).encode())
    assert 1_500_000 < size < LARGEST / 3
