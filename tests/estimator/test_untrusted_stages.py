"""Every way to load a model or estimator refuses what is not trusted, or damaged, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from auditing import deeds
from every_row import every
from hostile import (
    METADATA,
    OBJECTS,
    RELU,
    Json,
    bound,
    made,
    named,
    saved_estimator,
    saved_model,
)

from sparkdl import TorchEstimator, TorchModel, load_module
from sparkdl.checkpoint.object_spec import load_object
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import EXPECTED


@every(
    ("place", "spec"),
    [
        ("model", named("torch.optim.sgd:SGD")),
        ("model", named("torch.nn.functional:relu")),
        ("model", bound("torch.nn.functional:relu", 1)),
        ("model", {"tuple": [1, 2]}),
        ("loss", named("torch.nn.modules.loss:CrossEntropyLoss")),
        ("loss", bound("torch.optim.sgd:SGD")),
        ("optimizer", named(RELU)),
        ("optimizer", made(RELU)),
        ("optimizer", named("torch.nn.functional:cross_entropy")),
        ("scheduler", named("torch.optim.sgd:SGD")),
        ("strategy", named("sparkdl.strategies.parameter_averaging:ParameterAveraging")),
        ("strategy", made(RELU)),
        ("batchTransform", named(RELU)),
    ],
)
def test_what_does_not_belong_in_a_place_is_refused(place: str, spec: Json, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{place} must be an?"):
        load_object({"recipe": spec}, tmp_path, place, expected=EXPECTED[place], trust=False)


@every("load", [load_module, TorchModel.load, TorchEstimator.load])
@every("place", ["model", "optimizer", "strategy"])
def test_every_way_to_load_refuses_a_command(
    load: Callable[[str], Any], place: str, tmp_path: Path
) -> None:
    spec = {"recipe": made("os:system", command=f"touch {tmp_path / 'touched'}")}
    objects = {**OBJECTS, place: spec}
    metadata = {"uid": "stage", "paramMap": {}, "defaultParamMap": {}}
    path = saved_estimator(tmp_path, **{"objects.json": objects, "metadata/part-00000": metadata})
    saved_model(tmp_path, spec["recipe"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"os:system.*trust=\['os'\]"), deeds() as done:
            load(path)
        assert done == []
    assert not (tmp_path / "touched").exists()


@every(
    ("file", "content", "message"),
    [
        ("metadata/part-00000", {**METADATA, "paramMap": {"fit": 3}}, r"Params that.*\['fit'\]"),
        ("metadata/part-00000", {**METADATA, "paramMap": {"epochs": "many"}}, "epochs must be"),
        (
            "metadata/part-00000",
            {**METADATA, "paramMap": {"tls": "yes"}},
            "tls must be True or False",
        ),
        ("metadata/part-00000", {**METADATA, "paramMap": {"model": "os:system"}}, "model must be"),
        ("metadata/part-00000", {"uid": "stage"}, "it has no paramMap"),
        ("metadata/part-00000", [METADATA], "no JSON object"),
        ("objects.json", {}, r"it contains \[\]"),
        ("objects.json", {**OBJECTS, "uid": OBJECTS["model"]}, "'uid'"),
        (
            "objects.json",
            {**OBJECTS, "loss": None},
            "loss was saved as None, which is not an object spec",
        ),
        ("objects.json", {**OBJECTS, "loss": {"recipe": {}}}, "which is not an object spec"),
        (
            "objects.json",
            {**OBJECTS, "loss": {"recipe": {"new": 3}}},
            "object spec of loss is damaged",
        ),
    ],
)
def test_a_damaged_estimator_is_refused_with_what_is_wrong(
    file: str, content: Json, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEstimator.load(saved_estimator(tmp_path, **{file: content}))


def test_a_model_whose_outputs_mean_nothing_known_is_refused(tmp_path: Path) -> None:
    path = saved_estimator(tmp_path, **{"metadata/part-00000": {**METADATA, "paramMap": {}}})
    saved_model(tmp_path, named(RELU))
    description = (tmp_path / "module.json").read_text()
    (tmp_path / "module.json").write_text(description.replace('"logits"', '"os.system"'))
    with pytest.raises(ConfigError, match=r"unknown meaning of its outputs: 'os\.system'"):
        TorchModel.load(path)
