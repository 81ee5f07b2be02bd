"""Models as people have them, for what_happens.md."""

from __future__ import annotations

import sys
import threading
from functools import partial

import cloudpickle
import table_networks as networks
import torch
import torch.nn.functional as functional
from frames import CLASSES
from table_case import WIDTH, WORDS, Case, as_function, network
from table_networks import Model, body, head, mlp
from torch import nn
from torch.nn.utils import parametrizations

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IMAGE = {"columnShapes": {"features": [1, 4, 4]}}
SERIES = {"columnShapes": {"features": [4, 4]}}
SENTENCE = {"featuresCol": "tokens"}

MODELS = [
    Case("an MLP with `Dropout`", lambda: mlp(nn.Dropout(0.5)), random=True),
    Case("`SyncBatchNorm`", lambda: mlp(nn.SyncBatchNorm(8))),
    Case(
        "`Conv1d`",
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Tanh(), nn.Flatten(), head(16)),
        SERIES,
        "`columnShapes={'features': [channels, length]}`",
    ),
    Case(
        "`Conv2d` with `BatchNorm2d` and pooling",
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            head(16),
        ),
        IMAGE,
        "`columnShapes={'features': [channels, height, width]}`",
    ),
    Case(
        "`Conv2d` of flat rows", lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), head(16))
    ),
    Case(
        "`EmbeddingBag(max_norm=0.5)`",
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, max_norm=0.5), head()),
        settings=SENTENCE,
    ),
    Case(
        "`EmbeddingBag(sparse=True)` with Adam",
        partial(networks.embedding_bag, sparse=True, mode="sum"),
        settings={**SENTENCE, "optimizer": torch.optim.Adam},
    ),
    Case(
        "an embedding with fewer rows than the column has values",
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS - 1, 8), head()),
        settings=SENTENCE,
    ),
    *(
        Case(
            f"a bare `{kind.__name__}`, which returns {returned}",
            lambda kind=kind: kind(4, CLASSES, batch_first=True),
            {
                **SERIES,
                "loss": lambda outputs, targets: functional.cross_entropy(
                    outputs[0][:, -1], targets
                ),
                "outputCols": {"states": 0},
            },
            f"a loss of {what}; `outputCols={{'states': 0}}`",
        )
        for kind, returned, what in (
            (nn.GRU, "(outputs, state)", "both"),
            (nn.LSTM, "(outputs, (state, cell))", "all of them"),
        )
    ),
    Case(
        "the same with `CrossEntropyLoss()`",
        lambda: nn.LSTM(4, CLASSES, batch_first=True),
        settings=SERIES,
    ),
    as_function(
        "`weight_norm`", lambda: nn.Sequential(parametrizations.weight_norm(body()), head())
    ),
    Case(
        "`weight_norm`, as an instance",
        lambda: nn.Sequential(parametrizations.weight_norm(body()), head()),
    ),
    as_function("hook-based `torch.nn.utils.weight_norm`", networks.old_weight_norm),
    Case("hook-based `torch.nn.utils.weight_norm`, as an instance", networks.old_weight_norm),
    as_function(
        "`spectral_norm`", lambda: nn.Sequential(parametrizations.spectral_norm(body()), head())
    ),
    as_function(
        "`spectral_norm` behind `BatchNorm1d`",
        lambda: nn.Sequential(body(), nn.BatchNorm1d(8), parametrizations.spectral_norm(head())),
    ),
    as_function("`orthogonal`", lambda: nn.Sequential(parametrizations.orthogonal(body()), head())),
    as_function("a pruned model (`torch.nn.utils.prune`)", networks.pruned),
    Case("a pruned model, as an instance", networks.pruned),
    as_function("`torch.jit.script`", lambda: torch.jit.script(network())),
    Case("`torch.jit.script`, as an instance", lambda: torch.jit.script(network())),
    as_function("`torch.jit.trace`", networks.traced),
    as_function("`torch.compile`", lambda: torch.compile(network(), backend="eager")),
    Case("`torch.export`", networks.exported, as_function=True),
    Case("`torch.fx.symbolic_trace`", lambda: torch.fx.symbolic_trace(network())),
    Case("`DataParallel`", lambda: nn.DataParallel(network())),
    Case(
        "`DistributedDataParallel`",
        lambda: nn.parallel.DistributedDataParallel(network()),
        as_function=True,
    ),
    Case("`AveragedModel`", lambda: torch.optim.swa_utils.AveragedModel(network())),
    Case(
        "`LazyLinear`",
        lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES)),
        how="the first row gives the shapes",
        random=True,
    ),
    Case("a model frozen as a whole", lambda: network().requires_grad_(False)),
    Case("a model without parameters", lambda: nn.Softmax(dim=1)),
    Case("layers that the first forward pass makes", networks.GrowsLayers),
    Case("a buffer that is None until the first forward pass", networks.FillsBuffer),
    Case("a buffer of 8-bit floats", networks.Quantizes, as_function=True),
    Case("a sparse buffer", networks.Spreads),
    Case("a causal mask (minus infinity) as a buffer", networks.Masks, SERIES),
    Case(
        "the same with `persistent=False`",
        partial(networks.Masks, persistent=False),
        SERIES,
        "`columnShapes={'features': [length, width]}`",
    ),
    Case(
        "complex outputs",
        lambda: Model(
            lambda self, features: features.to(torch.complex64) @ self.weight,
            weight=nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64)),
        ),
        settings={
            "loss": lambda outputs, targets: functional.cross_entropy(outputs.abs(), targets)
        },
    ),
    Case(
        "parameters that are scalar, empty or transposed",
        lambda: Model(
            lambda self, features: features @ self.transposed * self.scalar + self.empty.sum(),
            transposed=nn.Parameter(torch.randn(CLASSES, WIDTH).t()),
            scalar=nn.Parameter(torch.tensor(2.0)),
            empty=nn.Parameter(torch.zeros(0, 3)),
        ),
    ),
    Case("`float16` parameters", lambda: network().half()),
    Case("`bfloat16` parameters", lambda: network().bfloat16()),
    Case("a quantized model (`quantize_dynamic`)", networks.quantized, as_function=True),
    Case("a model on the `meta` device", networks.on_no_device),
    Case("forward hooks", networks.hooked),
    Case(
        "a dict of outputs",
        partial(networks.several, lambda logits, hidden: {"logits": logits, "hidden": hidden}),
        {"loss": networks.named, "outputCols": {"prediction": "logits", "embedding": "hidden"}},
        "a loss that takes the dict; `outputCols={'prediction': 'logits'}`",
    ),
    Case(
        "a dataclass of outputs",
        partial(networks.several, networks.Outputs),
        {"loss": networks.named, "outputCols": {"prediction": "logits"}},
        "the same",
    ),
    Case(
        "a named tuple of outputs",
        partial(networks.several, networks.Pair),
        {"loss": networks.named, "outputCols": {"prediction": "logits"}},
        "the same",
    ),
    Case(
        "a tuple of outputs",
        partial(networks.several, lambda *outputs: outputs),
        {"loss": networks.first, "outputCols": {"prediction": 0}},
        "the same, by position: `outputCols={'prediction': 0}`",
    ),
    Case(
        "a tuple of outputs without `outputCols`",
        partial(networks.several, lambda *outputs: outputs),
        settings={"loss": networks.first},
    ),
    Case(
        "a model that computes its own loss",
        lambda: Model(networks.own_loss, head=head(WIDTH)),
        {"loss": "model", "outputCols": {"prediction": "logits"}},
        "`loss='model'`",
    ),
    Case("a loss with parameters of its own", settings={"loss": networks.Margin()}),
    Case(
        "several inputs (wide and deep)",
        lambda: Model(
            lambda self, features, scale: self.head(features) + scale[:, None] * self.scale,
            head=head(WIDTH),
            scale=nn.Parameter(torch.ones(CLASSES)),
        ),
        {"featuresCols": ["features", "scale"]},
        "`featuresCols`, in the order of the arguments",
    ),
    Case(
        "inputs by keyword",
        lambda: Model(
            lambda self, *, features, scale: self.head(features) * scale[:, None], head=head(WIDTH)
        ),
        {"featuresCols": ["scale", "features"], "featuresAs": "kwargs"},
        "`featuresAs='kwargs'`",
    ),
    Case(
        "inputs as one dict",
        lambda: Model(
            lambda self, given: self.head(given["features"]) * given["scale"][:, None],
            head=head(WIDTH),
        ),
        {"featuresCols": ["scale", "features"], "featuresAs": "dict"},
        "`featuresAs='dict'`",
    ),
    Case(
        "several heads with a label each",
        lambda: Model(
            lambda self, features: (self.kind(features), self.size(features)),
            kind=head(WIDTH),
            size=nn.Linear(WIDTH, 1),
        ),
        {
            "loss": networks.both_heads,
            "labelCols": ["label", "scale"],
            "outputCols": {"kind": 0, "size": 1},
        },
        "`labelCols`, and a loss of both tuples",
    ),
    Case(
        "a variational autoencoder",
        lambda: Model(networks.variational, encode=nn.Linear(WIDTH, 4), decode=nn.Linear(2, WIDTH)),
        {"loss": networks.bound, "labelCol": "features", "outputCols": {"code": "mean"}},
        random=True,
        how="the label is the features column",
    ),
    Case(
        "a model that holds a lock or an open file",
        lambda: Model(
            lambda self, features: self.head(features), head=head(WIDTH), lock=threading.Lock()
        ),
    ),
    Case(
        "a model that holds a tensor which is neither parameter nor buffer",
        lambda: Model(
            lambda self, features: self.head(features * self.scale),
            head=head(WIDTH),
            scale=torch.full((WIDTH,), 2.0),
        ),
    ),
]
