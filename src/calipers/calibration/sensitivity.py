"""Gradients of weights, for what the loss of a model depends on; one backward pass for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calipers.calibration.data import Batch, counted_tokens
from calipers.errors import ModelRunError
from calipers.statistics.sums import Sensitivity


@torch.enable_grad()
def add_sensitivities(
    model: nn.Module,
    statistics: Mapping[str, Sensitivity],
    batch: Batch,
    seeds: list[int],
    call: Any,
) -> None:
    """Let statistics of Linear modules take in the gradients of a batch.

    Labels are drawn from what the model itself predicts, each sequence with a seed of its own.
    No gradient is left on the model.

    :param call: runs the model on a batch, and returns its output
    """
    mask = batch["attention_mask"].bool()
    # A loss counts where the token that is predicted does.
    counts = mask[:, :-1] & counted_tokens(batch)[:, 1:].bool()
    tokens = [int(row.sum()) for row in counts]
    with _differentiable(model), _adding_gradients(model, statistics, tokens):
        logits = call(model, batch).logits[:, :-1].float()
        labels = torch.stack([_drawn(row, seed) for row, seed in zip(logits, seeds, strict=True)])
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        if not losses.requires_grad:
            raise ModelRunError(
                "lets no gradient through: how sensitive it is cannot be measured",
                subject=type(model).__name__,
                hint="Leave 'sensitivity' out of what is collected",
            )
        losses[counts.flatten()].sum().backward()  # type: ignore[no-untyped-call]


def _drawn(logits: Tensor, seed: int) -> Tensor:
    """Draw a label for each position."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(logits.shape, generator=generator).to(logits.device)
    # −log(−log u), in the memory of u: there are as many as tokens times words.
    noise.clamp_(min=1e-20).log_().neg_().log_().neg_()
    return noise.add_(logits.detach()).argmax(-1)


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Let gradients run through the model, and to none of its parameters."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(lambda *call: call[-1].requires_grad_(True))
    model.requires_grad_(False)
    try:
        yield
    finally:
        handle.remove()
        for parameter, requires_grad in before.items():
            parameter.requires_grad_(requires_grad)


@contextmanager
def _adding_gradients(
    model: nn.Module, statistics: Mapping[str, Sensitivity], tokens: list[int]
) -> Iterator[None]:
    def add(statistic: Sensitivity, x: Tensor, grad: Tensor) -> None:
        """Add the gradient of each sequence; tokens that come without their sequence are one."""
        apart = x.ndim == 3 and len(x) == len(tokens)
        pairs = zip(grad, x, tokens, strict=True) if apart else [(grad, x, sum(tokens))]
        for g, values, count in pairs:
            rows = g.detach().reshape(-1, g.shape[-1]).float()
            statistic.add_product(rows, values.reshape(-1, values.shape[-1]).float(), count)

    def hook(
        statistic: Sensitivity, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        if output.requires_grad:
            grad_hook = partial(add, statistic, inputs[0].detach())
            output.register_hook(grad_hook)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for name, statistic in statistics.items():
            handle = model.get_submodule(name).register_forward_hook(partial(hook, statistic))
            stack.callback(handle.remove)
        yield
