"""Networks and losses as people write them, for the table of models in what_happens.md."""

from __future__ import annotations

import dataclasses
import sys
from collections import namedtuple
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as functional
from frames import CLASSES
from table_case import ROWS, WIDTH, WORDS, network
from torch import Tensor, nn
from torch.nn.utils import prune

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Model(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward: Any, **layers: Any) -> None:
        super().__init__()
        self.call = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def head(width: int = 8) -> nn.Linear:
    return nn.Linear(width, CLASSES)


def body() -> nn.Linear:
    return nn.Linear(WIDTH, 8)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(body(), *between, nn.Tanh(), head())


@dataclasses.dataclass
class Outputs:
    """What a model returns."""

    logits: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", ["logits", "hidden"])


def several(kind: Any) -> nn.Module:
    def forward(self: Any, features: Tensor) -> Any:
        hidden = self.body(features).tanh()
        return kind(self.head(hidden), hidden)

    return Model(forward, body=body(), head=head())


def first(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0], targets)


def named(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return functional.cross_entropy(logits, targets)


def own_loss(self: Any, features: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
    logits = self.head(features)
    loss = None if labels is None else functional.cross_entropy(logits, labels)
    return {"loss": loss, "logits": logits}


def variational(self: Any, features: Tensor) -> dict[str, Tensor]:
    mean, log_variance = self.encode(features).chunk(2, dim=1)
    noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
    return {
        "rows": self.decode(mean + noise * (log_variance / 2).exp()),
        "mean": mean,
        "log_variance": log_variance,
    }


def bound(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    mean, log_variance = outputs["mean"], outputs["log_variance"]
    divergence = (log_variance.exp() + mean**2 - 1 - log_variance).mean() / 2
    return functional.mse_loss(outputs["rows"], targets) + divergence


def both_heads(outputs: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(outputs[0], targets[0]) + functional.mse_loss(
        outputs[1][:, 0], targets[1]
    )


def pruned() -> nn.Module:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


def traced() -> nn.Module:
    return torch.jit.trace(network(), torch.zeros(2, WIDTH))


def on_no_device() -> nn.Module:
    with torch.device("meta"):
        return network()


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(network(), {nn.Linear})


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda layer, given, outputs: outputs * 2)
    return model


def embedding_bag(**options: Any) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(WORDS, 8, **options), head())


class GrowsLayers(nn.Module):
    """Makes its second layer when it sees the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.head: nn.Module | None = None

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.body(features)
        if self.head is None:
            self.head = nn.Linear(hidden.shape[1], CLASSES)
        return self.head(hidden)


class FillsBuffer(nn.Module):
    """Has a buffer that is None until the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = head(WIDTH)
        self.register_buffer("shift", None)

    def forward(self, features: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = features.detach().mean(dim=0)
        return self.layer(features - self.shift)


class Quantizes(nn.Module):
    """Keeps a fixed layer's weights in a buffer of eight bits each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(WIDTH).to(torch.float8_e4m3fn))
        self.layer = head(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features @ self.weight.to(features.dtype))


class Spreads(nn.Module):
    """Multiplies by a fixed sparse matrix, as graph networks do by their graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())
        self.layer = head(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer((self.adjacency @ features.T).T)


class Masks(nn.Module):
    """Attends to what came before, by torch's own mask."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        self.register_buffer("mask", mask, persistent=persistent)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.head = head(4)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.attention(features, self.mask).mean(1))


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.scale * outputs, targets)


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(body()), head())


def exported() -> nn.Module:
    return torch.export.export(network(), (torch.zeros(ROWS, WIDTH),)).module()
