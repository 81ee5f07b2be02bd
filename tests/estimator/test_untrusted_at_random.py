"""Whatever files say at random, loading them without trust builds what torch has or refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hostile import (
    DESCRIPTION,
    FILES,
    LINEAR,
    RELU,
    SEQUENTIAL,
    SMALL,
    Json,
    bound,
    damaged,
    made,
    named,
    only_the_projects_errors,
    saved_estimator,
    saved_model,
    specs,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from sparkdl import TorchEstimator, load_module
from sparkdl.checkpoint.module_files import read_module
from sparkdl.checkpoint.object_spec import load_object
from sparkdl.checkpoint.trust import Trust
from sparkdl.estimator.persistence import EXPECTED


@settings(max_examples=250, deadline=None)
@given(place=st.sampled_from(sorted(EXPECTED)), spec=specs)
@example(place="model", spec=made(SEQUENTIAL, args=made("os:system", command="touch here")))
@example(place="optimizer", spec=bound("torch.optim.sgd:SGD", lr=0.1))
@example(place="model", spec=bound(SEQUENTIAL, made(LINEAR, in_features=2, out_features=3)))
def test_no_recipe_does_anything_but_build_what_torch_has(
    place: str, spec: Json, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp()
    saved = {"recipe": spec}
    value = only_the_projects_errors(
        lambda: load_object(saved, directory, place, expected=EXPECTED[place], trust=False)
    )
    if value is not None:
        assert EXPECTED[place].takes(value, Trust())
    if place == "model":
        saved_model(directory / "model", spec)
        only_the_projects_errors(lambda: load_module(directory / "model"))


@settings(max_examples=120, deadline=None)
@given(description=damaged(DESCRIPTION))
@example(description={**DESCRIPTION, "features": [{"name": "x", "dtype": "load", "row_shape": []}]})
@example(
    description={**DESCRIPTION, "features": [{"name": "x", "dtype": "_dynamo", "row_shape": []}]}
)
def test_a_damaged_description_is_read_or_refused_in_words(
    description: Json, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = saved_model(tmp_path_factory.getbasetemp() / "damaged", named(RELU))
    save_file(nn.Linear(2, 3).state_dict(), directory / "module.safetensors")
    (directory / "module.json").write_text(json.dumps(description))
    saved = only_the_projects_errors(lambda: read_module(directory, trust=False))
    if saved is not None:
        assert all(isinstance(feature.dtype, torch.dtype) for feature in saved.features)
        assert isinstance(saved.module, nn.Module)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), file=st.sampled_from(sorted(FILES)))
def test_a_damaged_estimator_is_read_or_refused_in_words(
    data: st.DataObject, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = data.draw(damaged(FILES[file]))
    path = saved_estimator(tmp_path_factory.getbasetemp() / "estimator", **{file: content})
    only_the_projects_errors(lambda: TorchEstimator.load(path))


def test_every_class_of_torchs_bears_being_called_with_nonsense(tmp_path: Path) -> None:
    for path in SMALL:
        for spec in (
            bound(path, 3, "os.system", {"list": [1, "a"]}),
            bound(path, named(RELU), named(path)),
            made(path, weight=made(RELU), device="os.system"),
        ):
            directory = saved_model(tmp_path / "model", spec)
            only_the_projects_errors(partial(load_module, directory))
