"""A small transformer as one writes it for one process."""

from __future__ import annotations

import sys

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS, WIDTH, HEADS, LENGTH, ROWS = 20, 16, 4, 8, 8
SECOND = ("*.projection", "*.narrow")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        normal = self.before(hidden)
        heads = (
            layer(normal).view(rows, length, HEADS, width // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        seen = seen.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.dropout(self.projection(seen))
        return hidden + self.narrow(F.gelu(self.wide(self.between(hidden))))


class Transformer(nn.Module):
    """Two blocks, with a parameter of its own that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("order", torch.arange(LENGTH).unsqueeze(0))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = (self.words(words) + self.places(self.order)) * self.scale
        return self.head(self.after(self.blocks(hidden)))


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Returns the losses and norms of the gradients."""
    seen = []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=random)
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [loss.item(), norm.item()]
    return seen
