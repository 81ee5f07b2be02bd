"""Models as people have them, for docs/models.md."""

from __future__ import annotations

import sys
import threading
from functools import partial

import cloudpickle
import torch
import torch.nn.functional as functional
from frames import CLASSES
from table_case import WIDTH, WORDS, Case, network
from table_networks import (
    Caches,
    Clips,
    Counts,
    Dropped,
    ExtraState,
    FillsBuffer,
    FillsCache,
    GrowsLayers,
    Margin,
    Model,
    Outputs,
    Pair,
    Quantizes,
    Rotates,
    Spreads,
    attends,
    auxiliary,
    auxiliary_loss,
    body,
    both_heads,
    bound,
    embedding_bag,
    ensemble,
    exported,
    first,
    forces,
    forces_loss,
    frozen,
    head,
    hooked,
    mlp,
    named,
    old_weight_norm,
    on_no_device,
    own_loss,
    pruned,
    quantized,
    recurrent,
    several,
    tied,
    traced,
    transformer,
    variational,
    with_listed_parameters,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IMAGE = {"columnShapes": {"features": [1, 4, 4]}}
SERIES = {"columnShapes": {"features": [4, 4]}}
SENTENCE = {"featuresCol": "tokens"}

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
        name="`spectral_norm` behind `BatchNorm1d`",
        model=lambda: nn.Sequential(
            body(), nn.BatchNorm1d(8), parametrizations.spectral_norm(head())
        ),
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
    Case(name="integer buffers, and buffers that are reassigned", model=Counts),
    Case(name="a buffer that is None until the first forward pass", model=FillsBuffer),
    Case(
        name="a cache (`persistent=False`) that is None until the first forward pass",
        model=FillsCache,
    ),
    Case(name="a cache (`persistent=False`) that grows with the batches", model=Caches),
    Case(name="complex and boolean buffers", model=Rotates),
    Case(name="a buffer of 8-bit floats", model=Quantizes, as_function=True),
    Case(name="a sparse buffer", model=Spreads),
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
