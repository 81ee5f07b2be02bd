"""What a project keeps beside ``with_trainer.py``, and edits: sentences to continue."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

WORDS, LENGTH = 16, 6


def next_word(word: Tensor) -> Tensor:
    return (word + 1) % WORDS


class Sentences(Dataset[dict[str, Tensor]]):
    """Each begins with a random word."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        words = [torch.randint(0, WORDS, (64,), generator=generator)]
        for _ in range(LENGTH - 1):
            words.append(next_word(words[-1]))
        self.words = torch.stack(words, dim=1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "labels": self.words[row]}
