"""The network: embedded categories beside the numbers, then a small perceptron."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DelayNetwork(nn.Module):
    """Predicts the logit of a late arrival.

    Args:
        numeric_size: numeric features a flight.
        vocabulary_sizes: known values of carrier, origin and destination; one more row in each
            embedding, the first, is for values never seen in training.
        embedding_sizes: dimensions of the three embeddings.
        hidden_sizes: units of the hidden layers.
        dropout: share of hidden units left out in training, 0 <= dropout < 1.
    """

    def __init__(
        self,
        numeric_size: int,
        vocabulary_sizes: Sequence[int],
        embedding_sizes: Sequence[int] = (8, 2, 16),
        hidden_sizes: Sequence[int] = (64, 32),
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        self.vocabulary_sizes = tuple(vocabulary_sizes)
        tables = [
            nn.Embedding(values + 1, size)
            for values, size in zip(vocabulary_sizes, embedding_sizes, strict=True)
        ]
        for table in tables:
            # Drawn from N(0, 1) they would drown the standardised numbers at first.
            nn.init.normal_(table.weight, std=0.1)
        self.embeddings = nn.ModuleList(tables)
        layers: list[nn.Module] = []
        width = numeric_size + sum(embedding_sizes)
        for hidden in hidden_sizes:
            layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
            width = hidden
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, numeric: Tensor, carrier: Tensor, origin: Tensor, dest: Tensor) -> Tensor:
        """Score a batch of flights.

        Args:
            numeric: standardised features, shape (batch, numeric_size), float.
            carrier: index, shape (batch,), int64.
            origin: index, shape (batch,), int64.
            dest: index, shape (batch,), int64.

        Returns:
            Logits of a late arrival, shape (batch, 1).
        """
        indices = (carrier, origin, dest)
        embedded = [
            embedding(index) for embedding, index in zip(self.embeddings, indices, strict=True)
        ]
        logits: Tensor = self.layers(torch.cat([numeric, *embedded], dim=1))
        return logits
