"""The models that methods are compared on, and the texts that they are calibrated and judged on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from contenders import SCHEMES as KNOWN
from contenders import Scheme, preset
from stories import CONTEXT, load_model, load_stories, load_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from calipers.demo import MODEL
from calipers.demo.text import Part, library_pieces

CALIBRATION, OTHERS, EVALUATION, FOREIGN = "calibration", "others", "evaluation", "foreign"
JUDGED = OTHERS, EVALUATION
"""The texts whose mean is judged: of the kind of the calibration, and of another."""

SAMPLES = 128  # of the calibration

Texts = dict[str, list[Tensor]]
"""Name → samples, (rows, tokens) each; the rows of a sample are not independent of each other."""

SCHEMES: dict[str, Scheme] = {**KNOWN, "W4A16": preset("W4A16")}


class Subject(NamedTuple):
    """A model and its texts.

    :param texts: those of the calibration first
    """

    name: str
    load: Callable[[], Any]
    tokenizer: Callable[[], Any]
    texts: Callable[[], Texts]
    schemes: tuple[str, ...]

    def halved(self) -> Subject:
        """Return the same with every other sample of the calibration."""
        texts = self.texts

        def halved_texts() -> Texts:
            return {**texts(), CALIBRATION: texts()[CALIBRATION][::2]}

        return self._replace(name=f"{self.name}, half of the data", texts=halved_texts)


def spaced(samples: list[Tensor], count: int) -> list[Tensor]:
    """Take at most so many, evenly from first to last."""
    count = min(count, len(samples))
    return [samples[index * len(samples) // count] for index in range(count)]


@cache
def texts_of_stories() -> Texts:
    """Return stories of two files, of which one is calibrated on in part, and Python's library.

    The stories of the two files differ: those of the evaluation are easier to predict.
    """
    stories, tokenizer = load_stories("calibration"), load_tokenizer()
    pieces = library_pieces("evaluation")
    library = [
        torch.tensor([tokenizer(piece)["input_ids"][:CONTEXT]])
        for piece in pieces[:: len(pieces) // 100][:100]
    ]
    return {
        CALIBRATION: stories[:SAMPLES],
        OTHERS: stories[300:400],
        EVALUATION: load_stories("evaluation"),
        FOREIGN: library,
    }


@cache
def texts_of_demo() -> Texts:
    """Return pieces of Python's library; those that are not calibrated on are taken whole.

    A piece fills the context of the model eight times; the calibration has the first of these.
    """
    calibration, evaluation = rows_of_library("calibration"), rows_of_library("evaluation")
    chosen = spaced(calibration, SAMPLES)
    taken = {piece.data_ptr() for piece in chosen}
    rest = [piece for piece in calibration if piece.data_ptr() not in taken]
    return {
        CALIBRATION: [piece[:1] for piece in chosen],
        OTHERS: spaced(rest, 200),
        EVALUATION: spaced(evaluation, 256),
    }


def rows_of_library(part: Part) -> list[Tensor]:
    """Return the tokens of each piece that is long enough, in rows that fill the context."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    pieces = (torch.tensor(tokenizer(piece)["input_ids"]) for piece in library_pieces(part))
    full = (piece[: len(piece) // CONTEXT * CONTEXT].view(-1, CONTEXT) for piece in pieces)
    return [rows for rows in full if len(rows)]


STORIES = Subject(
    "stories15M",
    load_model,
    load_tokenizer,
    texts_of_stories,
    ("W4A16-g96", "W4A16-g32", "W3A16-g32", "NVFP4A16", "MXFP4A16"),
)
DEMO = Subject(
    "the demo model",
    lambda: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16),
    lambda: AutoTokenizer.from_pretrained(MODEL),
    texts_of_demo,
    ("W4A16", "W4A16-g32", "W3A16-g32", "NVFP4A16"),  # its layers are 128 wide
)
