"""A transformer block with random weights and tokens, uneven in the ways that real ones are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

HIDDEN = 256
INTERMEDIATE = 512
HEADS = 4
EPSILON = 1e-6


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.q_proj = random_linear(HIDDEN, HIDDEN, generator)
        self.k_proj = random_linear(HIDDEN, HIDDEN, generator)
        self.v_proj = random_linear(HIDDEN, HIDDEN, generator)
        self.o_proj = random_linear(HIDDEN, HIDDEN, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of each sequence."""
        q, k, v = (split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj = random_linear(HIDDEN, INTERMEDIATE, generator)
        self.up_proj = random_linear(HIDDEN, INTERMEDIATE, generator)
        self.down_proj = random_linear(INTERMEDIATE, HIDDEN, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Work on each token alone."""
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One decoder layer. It returns what the layer adds to the residual stream."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.self_attn = Attention(generator)
        self.mlp = MLP(generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both updates, without ``x`` itself."""
        attention: Tensor = self.self_attn(F.rms_norm(x, x.shape[-1:], eps=EPSILON))
        middle = x + attention
        update: Tensor = self.mlp(F.rms_norm(middle, x.shape[-1:], eps=EPSILON))
        return attention + update

    def linears(self) -> dict[str, nn.Linear]:
        """Return the layers that are quantized, by name."""
        return {n: m for n, m in self.named_modules() if isinstance(m, nn.Linear)}


def split_heads(x: Tensor) -> Tensor:
    """Bring (batch, sequence, hidden) into the shape of attention states."""
    return x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)


def random_linear(columns: int, rows: int, generator: torch.Generator) -> nn.Linear:
    """Draw a Gaussian weight whose rows differ in size, with a few columns of outliers."""
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    weight *= torch.randn(rows, 1, generator=generator).mul(0.4).exp()
    outliers = torch.randperm(columns, generator=generator)[: columns // 128]
    weight[:, outliers] *= 3
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def random_batches(count: int, sequences: int, tokens: int, seed: int = 1) -> list[Tensor]:
    """Draw hidden states whose channels differ in size; a few are hot, more or less by batch."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(HIDDEN, generator=generator).mul(0.6).exp()
    hot = torch.randperm(HIDDEN, generator=generator)[: HIDDEN // 64]
    batches = torch.randn(count, sequences, tokens, HIDDEN, generator=generator) * sizes
    batches[..., hot] *= 4 + 8 * torch.rand(count, 1, 1, 1, generator=generator)
    return list(batches)
