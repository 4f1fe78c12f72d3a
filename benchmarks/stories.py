"""The model stories15M, the stories it is calibrated and judged on, and its perplexity.

The checkpoint is bfloat16. Stories run through a float32 copy of it, one at a time.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CONTEXT = 256  # tokens of a story that are used, BOS among them

Visit = Callable[[str, Tensor], Tensor]
"""Is told a site and what passes there, and returns what is to pass instead.

Sites are ``<linear>.input``, ``<layer>.k`` and ``<layer>.v``.
"""


def shared_folder() -> Path:
    """Return where the model and the stories are, or leave with advice."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("CALIPERS_SHARED", beside))
    if not (folder / "models" / "stories15M").is_dir():
        sys.exit(f"No models/stories15M in {folder}: set CALIPERS_SHARED to where it is.")
    return folder


def load_model() -> Any:
    """Load the model as the checkpoint has it."""
    folder = shared_folder() / "models" / "stories15M"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def load_tokenizer() -> Any:
    """Load the tokenizer of the model."""
    return AutoTokenizer.from_pretrained(shared_folder() / "models" / "stories15M")


def load_stories(name: str, limit: int | None = None) -> list[Tensor]:
    """Return the tokens of each story, BOS first, shape (1, tokens)."""
    tokenizer = load_tokenizer()
    lines = (shared_folder() / "text" / f"stories-{name}.jsonl").read_text().splitlines()
    stories = (tokenizer(json.loads(line)["text"])["input_ids"] for line in lines)
    tokens_of_all = [torch.tensor([tokens[:CONTEXT]]) for tokens in stories]
    return spread(tokens_of_all, limit or len(tokens_of_all))


def spread(stories: list[Tensor], count: int) -> list[Tensor]:
    """Take at most so many, evenly from first to last: stories of one kind stand together."""
    return stories[:: -(-len(stories) // count)]


def decoder_linears(model: Any) -> dict[str, Linear]:
    """Return what is quantized: every Linear but ``lm_head``, which is the embedding."""
    modules = model.model.layers.named_modules()
    return {name: module for name, module in modules if isinstance(module, Linear)}


class VisitedCache(DynamicCache):
    """A cache whose keys and values are visited as they enter attention."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit = visit

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what attention is to use; stories run whole, so nothing need be kept."""
        return self.visit(f"{layer_idx}.k", key_states), self.visit(f"{layer_idx}.v", value_states)


@contextmanager
def visited_inputs(model: Any, visit: Visit) -> Iterator[None]:
    """Visit the inputs of all linears."""

    def visit_input(site: str, _module: Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (visit(site, inputs[0]),)

    handles = [
        linear.register_forward_pre_hook(partial(visit_input, f"{name}.input"))
        for name, linear in decoder_linears(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def hidden_states(model: Any, stories: Sequence[Tensor], visit: Visit) -> Iterator[Tensor]:
    """Run the decoder over one story after the other, visiting every site."""
    with visited_inputs(model, visit):
        for story in stories:
            found = model.model(story, past_key_values=VisitedCache(visit), use_cache=True)
            yield found.last_hidden_state


def let_pass(_site: str, tensor: Tensor) -> Tensor:
    """Change nothing."""
    return tensor


@torch.no_grad()
def losses(model: Any, stories: Sequence[Tensor], visit: Visit = let_pass) -> list[float]:
    """Return −log q of all tokens but the first of each row, summed over each story."""
    found = []
    for story, hidden in zip(stories, hidden_states(model, stories, visit), strict=True):
        logits, targets = model.lm_head(hidden[:, :-1]), story[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        found.append(float(loss))
    return found


def predicted(stories: Sequence[Tensor]) -> list[int]:
    """Return how many tokens of each story are predicted."""
    return [story[:, 1:].numel() for story in stories]


def perplexity(model: Any, stories: Sequence[Tensor], visit: Visit) -> float:
    """Return exp of the mean negative log-likelihood of all tokens but the first of each story."""
    return math.exp(sum(losses(model, stories, visit)) / sum(predicted(stories)))
