"""Saved models and estimators whose files say whatever somebody hostile might write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from auditing import deeds
from hypothesis import strategies as st
from safetensors.torch import save_file

from sparkdl.checkpoint.trust import torchs_own
from sparkdl.errors import SparkDLError

Json = Any
LINEAR = "torch.nn.modules.linear:Linear"
SEQUENTIAL = "torch.nn.modules.container:Sequential"
RELU = "torch.nn.modules.activation:ReLU"
HOSTILE = [
    *("os:system", "posix:system", "subprocess:Popen", "subprocess:call"),
    *("builtins:eval", "builtins:exec", "builtins:__import__", "builtins:getattr"),
    *("functools:partial", "importlib:import_module", "shutil:rmtree"),
    *("this:s", "planted:Net", "__main__:run", "models:Net"),
    *("torch:load", "torch:save", "torch.hub:load", "torch.utils.cpp_extension:load"),
    *("torch.utils.collect_env:run", "torch.jit:load", "torch._dynamo:optimize"),
    "torch.nn:modules.os.system",
    "torch.nn.modules.module:Module.__init__.__globals__",
    "torch.nn.modules.module:torch.load",
    "torch.nn.functional:torch.save",
    "torch.nn.functional:importlib.import_module",
    "torch.nn.parallel.distributed:DistributedDataParallel",
    "torch.nn.modules.container:ParameterDict",
    "torch.optim.lr_scheduler:warnings.warn",
    "sparkdl.spark.functions.run:run",
    "sparkdl.checkpoint.object_spec:pickle.loads",
    "sparkdl.testing:run_world",
    *("", ":", "os", "os:", ":system", "os:system:system", ".os:system", "os.:system"),
    "o\0s:system",
]
"""Names that must neither be imported nor called."""
NEVER = {name.partition(":")[0] for name in HOSTILE}


def named(path: str) -> Json:
    return {"import": path}


def made(path: str, **kwargs: Json) -> Json:
    return {"new": named(path), "kwargs": kwargs}


def bound(path: str, *args: Json, **kwargs: Json) -> Json:
    return {"partial": named(path), "args": list(args), "kwargs": kwargs}


DESCRIPTION = {
    "format": 4,
    "model": {"recipe": bound(LINEAR, 2, 3)},
    "features": [
        {"name": "x", "dtype": "float32", "row_shape": [4], "encoding": "numbers", "padding": None}
    ],
    "labels": [],
    "loss": None,
    "head": "logits",
    "outputs": [{"key": None, "width": 3}, {"key": "logits", "width": None}],
    "history": [{"epoch": 1, "loss": 0.5, "examples": 3, "rounds": 1, "seconds": 0.5}],
}


METADATA = {
    "class": "sparkdl.estimator.estimator.TorchEstimator",
    "uid": "TorchEstimator_1",
    "paramMap": {"epochs": 3, "featuresCols": ["a"], "columnShapes": {"a": [2]}, "tls": False},
    "defaultParamMap": {"seed": 1, "labelCol": "label", "collectivePorts": "1-2"},
}
OBJECTS = {
    "model": {"recipe": bound(LINEAR, 2, 3)},
    "loss": {"recipe": made("torch.nn.modules.loss:CrossEntropyLoss", ignore_index=3)},
    "optimizer": {"recipe": bound("torch.optim.sgd:SGD", lr=0.1)},
    "scheduler": {"recipe": bound("torch.optim.lr_scheduler:StepLR", step_size=3)},
    "strategy": {
        "recipe": made("sparkdl.strategies.parameter_averaging:ParameterAveraging", period=3)
    },
}
FILES = {"metadata/part-00000": METADATA, "objects.json": OBJECTS}


def saved_model(directory: Path, spec: Json) -> Path:
    """The files of a model that is said to be built by that spec."""
    directory.mkdir(exist_ok=True)
    save_file({}, directory / "module.safetensors")
    description = {**DESCRIPTION, "model": {"recipe": spec}}
    (directory / "module.json").write_text(json.dumps(description))
    return directory


def saved_estimator(directory: Path, **files: Json) -> str:
    (directory / "metadata").mkdir(parents=True, exist_ok=True)
    for name, content in {**FILES, **files}.items():
        (directory / name).write_text(json.dumps(content))
    return str(directory)


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 6), st.floats(), st.text(max_size=8), st.just(2**70)
)
KEYS = ["import", "new", "partial", "args", "kwargs", "list", "dict", "pickle"]
arbitrary = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=3),
    ),
    max_leaves=8,
)
SMALL = [path for path in torchs_own() if not path.endswith(":Transformer")]  # 44 M parameters
paths = st.one_of(
    st.sampled_from(HOSTILE),
    st.sampled_from(SMALL),
    st.sampled_from([LINEAR, SEQUENTIAL, RELU, "torch.nn.modules.container:ModuleDict"]),
    st.builds(
        "{}:{}".format,
        st.sampled_from(["torch.nn", "torch.nn.modules", "os", "sparkdl", "models", "torch.optim"]),
        st.sampled_from(["Linear", "modules.os.system", "system", "Net", "__dict__", "SGD"]),
    ),
    st.text(max_size=12),
)
arguments = [
    *("in_features", "out_features", "modules", "args"),
    *("command", "self", "inplace", "module"),
]


def larger(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    positional = st.lists(inner, max_size=3)
    by_name = st.dictionaries(st.sampled_from(arguments), inner, max_size=3)
    called = st.builds(named, paths)
    fixed = st.fixed_dictionaries
    return st.one_of(
        fixed({"new": called, "kwargs": by_name}),
        fixed({"partial": st.one_of(called, inner), "args": positional, "kwargs": by_name}),
        *(fixed({"list": positional}), fixed({"tuple": positional}), fixed({"dict": by_name})),
    )


specs = st.recursive(st.one_of(numbers, st.builds(named, paths), arbitrary), larger, max_leaves=8)


def only_the_projects_errors(load: Callable[[], Any]) -> Any:
    """What it loads, None if it is refused; it has done nothing else."""
    before = set(sys.modules)
    value = None
    with deeds() as done, suppress(SparkDLError):
        value = load()
    assert done == []
    assert not (set(sys.modules) - before) & NEVER
    return value


@st.composite
def damaged(draw: st.DrawFn, intact: Json) -> Json:
    """The same, but that something in it is gone, or another value is in its place."""
    whole: Json = {"": json.loads(json.dumps(intact))}
    inside, key = whole, ""
    while isinstance(inside[key], (dict, list)) and inside[key] and draw(st.integers(0, 4)):
        inside = inside[key]
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else [0]))
    if inside is not whole and draw(st.booleans()):
        del inside[key]
    else:
        inside[key] = draw(arbitrary | specs)
    return whole[""]
