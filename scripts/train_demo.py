"""Train the language model that ships with Calipers, and write what it has learned.

    python scripts/train_demo.py

It reads the standard library of the Python that runs it, except the modules that are kept for
calibration and evaluation, byte by byte. Everything follows from the seed; on two cores it takes
well under an hour. The result goes to ``src/calipers/demo/model``, with a README that says how
well the model predicts the modules it has never seen.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import math
import platform
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from calipers.demo.text import Part, library_texts

OUTPUT = Path(__file__).parent.parent / "src" / "calipers" / "demo" / "model"
END = 256
"""The token that stands before every file; all others are bytes."""
WINDOW = 256
BATCH = 16
STEPS = 6000
WARM_UP = 200
COOL_DOWN = 0.5
"""The share of the steps over which the learning rate falls to zero."""
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1

CONFIG = LlamaConfig(
    vocab_size=END + 1,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=WINDOW,
    tie_word_embeddings=True,
    bos_token_id=END,
    eos_token_id=END,
    pad_token_id=None,
    attention_bias=False,
)


def new_model() -> Any:
    """Return a model that has learned nothing."""
    kind: Any = LlamaForCausalLM
    return kind(CONFIG)


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    learned = stream("training")
    model = train(new_model(), learned, given.steps)
    minutes = time.process_time() / torch.get_num_threads() / 60  # others may be at work, too
    model.to(torch.bfloat16).save_pretrained(given.output)
    byte_tokenizer().save_pretrained(given.output)
    figures = bits_per_byte(model, learned, stream("evaluation"))
    write_readme(given.output, figures, learned, given.seed, given.steps, minutes)
    print((given.output / "README.md").read_text(encoding="utf-8"))


def stream(part: Part) -> Tensor:
    """Return the files of one part as one row of tokens."""
    tokens: list[int] = []
    for text in library_texts(part).values():
        tokens += [END, *text.encode()]
    return torch.tensor(tokens)


def train(model: Any, text: Tensor, steps: int) -> Any:
    """Let the model predict windows of the text, drawn at random, each token from those before."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmth(steps))
    model.train()
    started = time.perf_counter()
    for step, windows in enumerate(random_windows(text, steps)):
        logits = model(windows, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.perf_counter() - started
            bits = loss.item() / math.log(2)
            print(f"step {step:5d}  {bits:.3f} bits per byte  {seconds:6.0f} s", flush=True)
    return model.eval()


def warmth(steps: int) -> Callable[[int], float]:
    """Return the learning rate's course: it rises, stays, and falls to zero."""
    return lambda step: min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * COOL_DOWN))


def random_windows(text: Tensor, steps: int) -> Iterator[Tensor]:
    """Draw batches of windows."""
    for _ in range(steps):
        begins = torch.randint(len(text) - WINDOW, (BATCH,))
        yield torch.stack([text[begin : begin + WINDOW] for begin in begins])


def byte_tokenizer() -> Any:
    """Make the tokenizer whose token ids are the bytes themselves."""
    # How ByteLevel writes a byte: as itself where that can be seen, else as a letter from 256 up.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {**{chr(b): b for b in seen}, **{chr(256 + i): b for i, b in enumerate(unseen)}}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<|end|>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    kind: Any = PreTrainedTokenizerFast
    return kind(
        tokenizer_object=tokenizer,
        bos_token="<|end|>",
        eos_token="<|end|>",
        model_max_length=WINDOW,
    )


def bits_per_byte(model: Any, learned: Tensor, unseen: Tensor) -> dict[str, float]:
    """Return how many bits each way of predicting needs for a byte of unseen text."""
    before, after = (bytes(t[t != END].tolist()) for t in (learned, unseen))
    bits = 8 / len(after)
    return {
        "this model": bits_of_model(model, unseen),
        "a bigram model of the same training text": bits_of_bigrams(learned, unseen),
        "`lzma` (preset 9, extreme)": compressed(after) * bits,
        "`lzma` that has read the training text": (compressed(before + after) - compressed(before))
        * bits,
    }


@torch.no_grad()
def bits_of_model(model: Any, text: Tensor) -> float:
    """Return the mean over windows that do not overlap; their first tokens have no context."""
    windows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    nats = 0.0
    for batch in torch.split(windows, BATCH):
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        nats += cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return nats / windows[:, 1:].numel() / math.log(2)


def bits_of_bigrams(learned: Tensor, text: Tensor) -> float:
    """Return the bits of a table of pairs, every pair counted once more than it was seen."""
    size = END + 1
    pairs = torch.bincount(learned[:-1] * size + learned[1:], minlength=size * size)
    odds = (pairs.view(size, size) + 1).double()
    odds /= odds.sum(1, keepdim=True)
    return float(-odds[text[:-1], text[1:]].log2().mean())


def compressed(data: bytes) -> int:
    """Return the size of data after compression, with a dictionary that holds all of it."""
    kind = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=[kind]))


def write_readme(
    folder: Path, figures: dict[str, float], learned: Tensor, seed: int, steps: int, minutes: float
) -> None:
    """Write what the model is and how good it is."""
    parameters = sum(parameter.numel() for parameter in new_model().parameters())
    size = (folder / "model.safetensors").stat().st_size
    digest = hashlib.sha256(bytes(learned[learned != END].tolist())).hexdigest()
    what = f"""
        A Llama of {parameters:,} parameters in bfloat16 ({size / 1e6:.1f} MB):
        {CONFIG.num_hidden_layers} layers, hidden size {CONFIG.hidden_size}, windows of {WINDOW}
        tokens, and a token is a byte. It has learned Python from the standard library, and is here
        so that `calipers demo` has something real to quantize. It is good for nothing else."""
    how = f"""
        `scripts/train_demo.py` has made it, and this page: seed {seed}, {steps:,} steps of
        {BATCH * WINDOW:,} bytes, {minutes:.0f} minutes of {torch.get_num_threads()} cores. It
        read the sources of Python {platform.python_version()} ({len(learned):,} bytes, SHA-256
        `{digest[:16]}…`), except tests, tables, and the modules that `calipers.demo.text` keeps for
        calibration and evaluation."""
    rows = "\n".join(f"| {name} | {bits:.3f} |" for name, bits in figures.items())
    parts = (
        "# The model that ships",
        *(textwrap.fill(" ".join(text.split()), 120) for text in (what, how)),
        "Bits per byte on the modules kept for evaluation, which it has never seen:",
        f"| predictor | bits per byte |\n|---|---|\n{rows}",
        "The weights are under the licence of Calipers; the text they come from is not part of it.",
    )
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
