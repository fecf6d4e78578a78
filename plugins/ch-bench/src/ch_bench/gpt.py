"""A small GPT, which the demo trains and the benchmark times.

A decoder-only transformer with pre-normalisation, causal attention and the output head tied to the embedding
(Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"). Its parameters
are a typical mix: large matrices, which are worth compressing, and many small vectors, which are not.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a four times wider MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, time, width)`` to the same shape. Position t sees positions <= t."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width // heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Next-symbol predictor. ``forward(x, y)`` returns the mean cross-entropy in nats per symbol.

    ``x`` and ``y`` are ``(batch, time)`` int64 with ``time <= context`` and values in ``[0, vocab)``.
    """

    def __init__(self, vocab: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self._init)
        for name, weight in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):  # keep the stream's variance independent of depth
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of predicting ``y`` from ``x``, a 0-d float tensor."""
        stream = self.symbol(x) + self.position(torch.arange(x.shape[1], dtype=torch.int64, device=x.device))
        for block in self.blocks:
            stream = block(stream)
        logits = self.norm(stream) @ self.symbol.weight.T  # (batch, time, vocab)
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements that receive gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
