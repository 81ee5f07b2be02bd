"""Models of token rows of unequal length, whose answers do not depend on the padding."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS, CLASSES = 50, 3


def tokens_of(row: int) -> list[int]:
    """From 0 to 12 words of row ``row``; each tenth row is empty."""
    count = 0 if row % 10 == 0 else 1 + row * 5 % 12
    return [1 + (row * 7 + k * k * 3) % (WORDS - 1) for k in range(count)]


def label_of(row: int) -> int:
    return row % CLASSES


class Bag(nn.Module):
    """The mean of a row's embeddings, then a linear layer; of an empty row, the bias alone."""

    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(1)
        self.embedding = nn.Embedding(WORDS, 4)
        self.out = nn.Linear(4, CLASSES)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.from_numpy(drawn.normal(size=tuple(each.shape))))

    def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        kept = (~padding_mask)[..., None].float()
        total = (self.embedding(tokens) * kept).sum(1)
        mean: Tensor = self.out(total / kept.sum(1).clamp(min=1))
        return mean

    def row(self, tokens: list[int]) -> Tensor:
        """The same of one row, without padding."""
        weight = self.embedding.weight
        mean = weight[tokens].mean(0) if tokens else torch.zeros(4)
        answer: Tensor = self.out(mean)
        return answer


class Named(nn.Module):
    """A ``Bag`` that is called as Hugging Face's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = Bag()

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        answer: Tensor = self.bag(input_ids, attention_mask == 0)
        return answer


class EachItem(nn.Module):
    """An answer an item, not one a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 1)

    def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        answers: Tensor = self.embedding(tokens)[..., 0]
        return answers


def mean_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of any outputs."""
    return outputs.mean()


def alone(rows: int, epochs: int, lr: float) -> Bag:
    """One process, no padding, every row by itself: gradient descent on all rows at once."""
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    targets = torch.tensor([label_of(row) for row in range(rows)])
    for _ in range(epochs):
        outputs = torch.stack([model.row(tokens_of(row)) for row in range(rows)])
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
    return model
