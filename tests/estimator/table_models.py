"""Models as people have them, for docs/models.md."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import namedtuple
from functools import partial
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as functional
from frames import CLASSES
from table_case import ROWS, WIDTH, WORDS, Case, network
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IMAGE = {"columnShapes": {"features": [1, 4, 4]}}
SERIES = {"columnShapes": {"features": [4, 4]}}
SENTENCE = {"featuresCol": "tokens"}


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


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Model(
        lambda self, series: self.head(self.layer(series)[0][:, -1]),
        layer=kind(4, 8, batch_first=True),
        head=head(),
    )


def transformer(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    return Model(
        lambda self, series: self.head(self.encoder(series).mean(dim=1)),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=head(4),
    )


def attends(self: Any, series: Tensor) -> Tensor:
    return self.head(self.attention(series, series, series, need_weights=False)[0].mean(dim=1))


def tied() -> nn.Module:
    first, second = body(), nn.Linear(8, WIDTH)
    second.weight = nn.Parameter(first.weight.t().clone())
    model = Model(
        lambda self, features: self.decode(self.encode(features).tanh()) @ self.encode.weight.t(),
        encode=nn.Linear(WIDTH, WIDTH),
        decode=nn.Linear(WIDTH, WIDTH),
    )
    model.decode.weight = model.encode.weight
    return nn.Sequential(model, head(WIDTH))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Dropped(torch.autograd.Function):
    """The sign forward, the identity backward."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Counts(nn.Module):
    """A buffer that it writes to, one that it assigns anew, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(dim=0)
        return self.layer((features - self.mean) * self.scale)


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


def with_listed_parameters() -> nn.Module:
    return Model(
        lambda self, features: sum(features @ each for each in self.parts) * self.named["scale"],
        parts=nn.ParameterList(torch.randn(WIDTH, CLASSES) for _ in range(2)),
        named=nn.ParameterDict({"scale": torch.ones(CLASSES)}),
    )


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


class Caches(nn.Module):
    """Keeps a table as long as the longest batch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = head(WIDTH)
        self.register_buffer("table", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        if len(self.table) < len(features):
            self.table = torch.ones(len(features), WIDTH)
        return self.layer(features + self.table[: len(features)])


class Rotates(nn.Module):
    """Complex and boolean buffers, as rotary embeddings and causal masks are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / 10))
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.layer = head(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        turned = (features * self.turns).real
        return self.layer(turned.masked_fill(self.mask, 0.0))


def forces(self: Any, features: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        places = features.requires_grad_()
        energy = self.head(self.body(places).tanh())
        (force,) = torch.autograd.grad(
            energy.sum(), places, create_graph=torch.is_grad_enabled() and self.training
        )
    return {"logits": energy, "force": force}


def forces_loss(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["logits"], targets) + outputs["force"].square().mean()


def of_absolutes(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.abs(), targets)


class Clips(nn.Module):
    """Keeps its weights small by giving them other memory, as programs for GANs do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = head(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
        return self.layer(features)


class ExtraState(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = head(WIDTH)
        self.note = {"unit": "m"}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


def ensemble(self: Any, features: Tensor) -> Tensor:
    return torch.vmap(lambda weight: features @ weight)(self.weights).mean(dim=0)


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.scale * outputs, targets)


def auxiliary(self: Any, features: Tensor) -> Any:
    hidden = self.body(features).tanh()
    return (self.head(hidden), self.other(hidden)) if self.training else self.head(hidden)


def auxiliary_loss(outputs: Any, targets: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return functional.cross_entropy(outputs, targets)
    return sum(functional.cross_entropy(each, targets) for each in outputs)


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(body()), head())


def exported() -> nn.Module:
    return torch.export.export(network(), (torch.zeros(ROWS, WIDTH),)).module()


MODELS = [
    Case(name="`Linear`", model=lambda: nn.Linear(WIDTH, CLASSES)),
    Case(
        name="a class",
        model=ExtraState,
        as_function=True,
    ),
    Case(name="an MLP with `Dropout`", model=lambda: mlp(nn.Dropout(0.5)), random=True),
    Case(name="`BatchNorm1d`", model=lambda: mlp(nn.BatchNorm1d(8))),
    Case(name="a model in evaluation mode", model=lambda: mlp(nn.BatchNorm1d(8)).eval()),
    Case(name="`SyncBatchNorm`", model=lambda: mlp(nn.SyncBatchNorm(8))),
    Case(name="`LayerNorm`", model=lambda: mlp(nn.LayerNorm(8))),
    Case(name="`GroupNorm`", model=lambda: mlp(nn.GroupNorm(2, 8))),
    Case(
        name="`Conv1d`",
        model=lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Tanh(), nn.Flatten(), head(16)),
        how="`columnShapes={'features': [channels, length]}`",
        settings=SERIES,
    ),
    Case(
        name="`Conv2d` with `BatchNorm2d` and pooling",
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            head(16),
        ),
        how="`columnShapes={'features': [channels, height, width]}`",
        settings=IMAGE,
    ),
    Case(
        name="`Conv2d` of flat rows",
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), head(16)),
    ),
    Case(
        name="a model in `channels_last`",
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), head(16)).to(
            memory_format=torch.channels_last
        ),
        settings=IMAGE,
    ),
    Case(
        name="`Embedding`",
        model=lambda: Model(
            lambda self, tokens: self.head(self.table(tokens).mean(dim=1)),
            table=nn.Embedding(WORDS, 8),
            head=head(),
        ),
        settings=SENTENCE,
    ),
    Case(name="`EmbeddingBag`", model=embedding_bag, settings=SENTENCE),
    Case(
        name="`EmbeddingBag(max_norm=0.5)`",
        model=lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, max_norm=0.5), head()),
        settings=SENTENCE,
    ),
    Case(
        name="`EmbeddingBag(sparse=True)` with SGD",
        model=partial(embedding_bag, sparse=True, mode="sum"),
        settings=SENTENCE,
    ),
    Case(
        name="`EmbeddingBag(sparse=True)` with Adam",
        model=partial(embedding_bag, sparse=True, mode="sum"),
        settings={**SENTENCE, "optimizer": torch.optim.Adam},
    ),
    Case(
        name="an embedding with fewer rows than the column has values",
        model=lambda: nn.Sequential(nn.EmbeddingBag(WORDS - 1, 8), head()),
        settings=SENTENCE,
    ),
    Case(name="`GRU`", model=partial(recurrent, nn.GRU), settings=SERIES),
    Case(name="`LSTM`", model=partial(recurrent, nn.LSTM), settings=SERIES),
    Case(
        name="a bare `GRU`, which returns (outputs, state)",
        model=lambda: nn.GRU(4, CLASSES, batch_first=True),
        how="a loss of both; `outputCols={'states': 0}`",
        settings={
            **SERIES,
            "loss": lambda outputs, targets: functional.cross_entropy(outputs[0][:, -1], targets),
            "outputCols": {"states": 0},
        },
    ),
    Case(
        name="a bare `LSTM`, which returns (outputs, (state, cell))",
        model=lambda: nn.LSTM(4, CLASSES, batch_first=True),
        how="a loss of all of them; `outputCols={'states': 0}`",
        settings={
            **SERIES,
            "loss": lambda outputs, targets: functional.cross_entropy(outputs[0][:, -1], targets),
            "outputCols": {"states": 0},
        },
    ),
    Case(
        name="the same with `CrossEntropyLoss()`",
        model=lambda: nn.LSTM(4, CLASSES, batch_first=True),
        settings=SERIES,
    ),
    Case(name="`TransformerEncoder`", model=partial(transformer, 0.0), settings=SERIES),
    Case(
        name="`TransformerEncoder` with dropout",
        model=partial(transformer, 0.1),
        settings=SERIES,
        random=True,
    ),
    Case(
        name="`MultiheadAttention`",
        model=lambda: Model(
            attends, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=head(4)
        ),
        settings=SERIES,
    ),
    Case(
        name="`weight_norm`",
        model=lambda: nn.Sequential(parametrizations.weight_norm(body()), head()),
        as_function=True,
        how="given as a function",
    ),
    Case(
        name="`weight_norm`, as an instance",
        model=lambda: nn.Sequential(parametrizations.weight_norm(body()), head()),
    ),
    Case(
        name="hook-based `torch.nn.utils.weight_norm`",
        model=old_weight_norm,
        as_function=True,
        how="given as a function",
    ),
    Case(name="hook-based `torch.nn.utils.weight_norm`, as an instance", model=old_weight_norm),
    Case(
        name="`spectral_norm`",
        model=lambda: nn.Sequential(parametrizations.spectral_norm(body()), head()),
        as_function=True,
        how="given as a function",
    ),
    Case(
        name="`orthogonal`",
        model=lambda: nn.Sequential(parametrizations.orthogonal(body()), head()),
        as_function=True,
        how="given as a function",
    ),
    Case(
        name="a pruned model (`torch.nn.utils.prune`)",
        model=pruned,
        as_function=True,
        how="given as a function",
    ),
    Case(name="a pruned model, as an instance", model=pruned),
    Case(
        name="`torch.jit.script`",
        model=lambda: torch.jit.script(network()),
        as_function=True,
        how="given as a function",
    ),
    Case(name="`torch.jit.script`, as an instance", model=lambda: torch.jit.script(network())),
    Case(name="`torch.jit.trace`", model=traced, as_function=True, how="given as a function"),
    Case(
        name="`torch.compile`",
        model=lambda: torch.compile(network(), backend="eager"),
        as_function=True,
        how="given as a function",
    ),
    Case(name="`torch.export`", model=exported, as_function=True),
    Case(name="`torch.fx.symbolic_trace`", model=lambda: torch.fx.symbolic_trace(network())),
    Case(
        name="`DataParallel`",
        model=lambda: nn.DataParallel(network()),
    ),
    Case(
        name="`DistributedDataParallel`",
        model=lambda: nn.parallel.DistributedDataParallel(network()),
        as_function=True,
    ),
    Case(
        name="`AveragedModel`",
        model=lambda: torch.optim.swa_utils.AveragedModel(network()),
    ),
    Case(
        name="`LazyLinear`",
        model=lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES)),
        how="the first row gives the shapes",
        random=True,
    ),
    Case(name="shared parameters (tied weights)", model=tied),
    Case(name="a frozen backbone", model=frozen),
    Case(
        name="a model frozen as a whole",
        model=lambda: network().requires_grad_(False),
    ),
    Case(name="a model without parameters", model=lambda: nn.Softmax(dim=1)),
    Case(
        name="a parameter that no forward pass uses",
        model=lambda: Model(
            lambda self, features: self.used(features),
            used=nn.Linear(WIDTH, CLASSES),
            unused=nn.Linear(WIDTH, CLASSES),
        ),
    ),
    Case(name="weights that get other memory (`weight.data = ...`)", model=Clips),
    Case(name="layers that the first forward pass makes", model=GrowsLayers),
    Case(name="`ParameterList`, `ParameterDict`", model=with_listed_parameters),
    Case(name="integer buffers, and buffers that are assigned anew", model=Counts),
    Case(name="a buffer that is None until the first forward pass", model=FillsBuffer),
    Case(name="a buffer that grows with the batches", model=Caches),
    Case(name="complex and boolean buffers", model=Rotates),
    Case(
        name="complex parameters",
        model=lambda: Model(
            lambda self, features: (features.to(torch.complex64) @ self.weight).abs(),
            weight=nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64)),
        ),
    ),
    Case(
        name="complex outputs",
        model=lambda: Model(
            lambda self, features: features.to(torch.complex64) @ self.weight,
            weight=nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64)),
        ),
        settings={
            "loss": lambda outputs, targets: functional.cross_entropy(outputs.abs(), targets)
        },
    ),
    Case(
        name="parameters that are scalar, empty or transposed",
        model=lambda: Model(
            lambda self, features: features @ self.transposed * self.scalar + self.empty.sum(),
            transposed=nn.Parameter(torch.randn(CLASSES, WIDTH).t()),
            scalar=nn.Parameter(torch.tensor(2.0)),
            empty=nn.Parameter(torch.zeros(0, 3)),
        ),
    ),
    Case(name="`float64` parameters", model=lambda: network().double()),
    Case(name="`float16` parameters", model=lambda: network().half()),
    Case(name="`bfloat16` parameters", model=lambda: network().bfloat16()),
    Case(
        name="parameters of several dtypes",
        model=lambda: Model(
            lambda self, features: self.head(self.body(features).tanh().double()),
            body=body(),
            head=head().double(),
        ),
    ),
    Case(name="a quantized model (`quantize_dynamic`)", model=quantized, as_function=True),
    Case(name="a model on the `meta` device", model=on_no_device),
    Case(
        name="an ensemble by `torch.vmap`",
        model=lambda: Model(ensemble, weights=nn.Parameter(torch.randn(3, WIDTH, CLASSES))),
    ),
    Case(
        name="a model that differentiates itself, with `enable_grad`",
        model=lambda: Model(forces, body=body(), head=head()),
        settings={"loss": forces_loss, "outputCols": {"prediction": "logits"}},
    ),
    Case(
        name="gradient checkpointing",
        model=lambda: Model(
            lambda self, features: self.head(
                checkpoint(self.body, features, use_reentrant=False).tanh()
            ),
            body=body(),
            head=head(),
        ),
    ),
    Case(
        name="an `autograd.Function` of its own",
        model=lambda: Model(
            lambda self, features: self.head(Dropped.apply(self.body(features))),
            body=body(),
            head=head(),
        ),
    ),
    Case(name="forward hooks", model=hooked),
    Case(
        name="a dict of outputs",
        model=partial(several, lambda logits, hidden: {"logits": logits, "hidden": hidden}),
        how="a loss that takes the dict; `outputCols={'prediction': 'logits'}`",
        settings={"loss": named, "outputCols": {"prediction": "logits", "embedding": "hidden"}},
    ),
    Case(
        name="a dataclass of outputs",
        model=partial(several, Outputs),
        how="the same",
        settings={"loss": named, "outputCols": {"prediction": "logits"}},
    ),
    Case(
        name="a named tuple of outputs",
        model=partial(several, Pair),
        how="the same",
        settings={"loss": named, "outputCols": {"prediction": "logits"}},
    ),
    Case(
        name="a tuple of outputs",
        model=partial(several, lambda *outputs: outputs),
        how="the same, by position: `outputCols={'prediction': 0}`",
        settings={"loss": first, "outputCols": {"prediction": 0}},
    ),
    Case(
        name="a tuple of outputs without `outputCols`",
        model=partial(several, lambda *outputs: outputs),
        settings={"loss": first},
    ),
    Case(
        name="more outputs in training than in evaluation",
        model=lambda: Model(auxiliary, body=body(), head=head(), other=head()),
        settings={"loss": auxiliary_loss},
    ),
    Case(
        name="a model that computes its own loss",
        model=lambda: Model(own_loss, head=head(WIDTH)),
        how="`loss='model'`",
        settings={"loss": "model", "outputCols": {"prediction": "logits"}},
    ),
    Case(
        name="a loss with parameters of its own",
        settings={"loss": Margin()},
    ),
    Case(
        name="several inputs (wide and deep)",
        model=lambda: Model(
            lambda self, features, scale: self.head(features) + scale[:, None] * self.scale,
            head=head(WIDTH),
            scale=nn.Parameter(torch.ones(CLASSES)),
        ),
        how="`featuresCols`, in the order of the arguments",
        settings={"featuresCols": ["features", "scale"]},
    ),
    Case(
        name="inputs by keyword",
        model=lambda: Model(
            lambda self, *, features, scale: self.head(features) * scale[:, None],
            head=head(WIDTH),
        ),
        how="`featuresAsKwargs=True`",
        settings={"featuresCols": ["scale", "features"], "featuresAsKwargs": True},
    ),
    Case(
        name="inputs as one dict",
        model=lambda: Model(
            lambda self, given: self.head(given["features"]) * given["scale"][:, None],
            head=head(WIDTH),
        ),
        how="`featuresAsDict=True`",
        settings={"featuresCols": ["scale", "features"], "featuresAsDict": True},
    ),
    Case(
        name="several heads with a label each",
        model=lambda: Model(
            lambda self, features: (self.kind(features), self.size(features)),
            kind=head(WIDTH),
            size=nn.Linear(WIDTH, 1),
        ),
        how="`labelCols`, and a loss of both tuples",
        settings={
            "loss": both_heads,
            "labelCols": ["label", "scale"],
            "outputCols": {"kind": 0, "size": 1},
        },
    ),
    Case(
        name="a variational autoencoder",
        model=lambda: Model(variational, encode=nn.Linear(WIDTH, 4), decode=nn.Linear(2, WIDTH)),
        how="the label is the features column",
        settings={"loss": bound, "labelCol": "features", "outputCols": {"code": "mean"}},
        random=True,
    ),
    Case(
        name="a model that holds a lock or an open file",
        model=lambda: Model(
            lambda self, features: self.head(features), head=head(WIDTH), lock=threading.Lock()
        ),
    ),
    Case(
        name="a model that holds a tensor which is neither parameter nor buffer",
        model=lambda: Model(
            lambda self, features: self.head(features * self.scale),
            head=head(WIDTH),
            scale=torch.full((WIDTH,), 2.0),
        ),
    ),
    Case(name="`get_extra_state`", model=ExtraState),
]
