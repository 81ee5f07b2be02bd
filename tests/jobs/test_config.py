"""The configuration file and the command line of jobs/train.py."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from flights.network import DelayNetwork
from flights.preparation import Split
from train import read_config

from sparkdl import ParameterAveraging, TorchEstimator

CONFIG = str(Path(__file__).parents[2] / "conf" / "flights.yaml")


def test_the_file_builds_the_real_estimator_from_importable_builders():
    config = read_config(["--config", CONFIG])
    estimator = config.estimator
    assert isinstance(estimator, TorchEstimator)
    assert isinstance(estimator.getStrategy(), ParameterAveraging)
    assert isinstance(estimator.getModel(), functools.partial)
    assert estimator.getModel().func is DelayNetwork
    assert estimator.getOptimizer().func is torch.optim.AdamW
    assert config.split == Split(train_months=(1, 10), test_months=(11, 12))


def test_the_command_line_wins_over_the_file():
    config = read_config(
        [
            *("--config", CONFIG),
            *("--estimator.epochs", "3"),
            *("--estimator.model.init_args.hidden_sizes", "[8]"),
            *("--output", "elsewhere"),
        ]
    )
    assert config.estimator.getEpochs() == 3
    assert config.estimator.getModel()().layers[0].out_features == 8
    assert config.output == "elsewhere"


def test_the_file_may_leave_the_loss_to_the_model_and_choose_outputs(tmp_path):
    file = tmp_path / "own.yaml"
    loss = "loss: torch.nn.functional.binary_cross_entropy_with_logits"
    chosen = "loss: model\n  outputCols: {logit: logits, embedding: 1}\n  featuresAsKwargs: true"
    file.write_text(Path(CONFIG).read_text().replace(loss, chosen))
    estimator = read_config(["--config", str(file)]).estimator
    assert estimator.getLoss() == "model"
    assert estimator.getOutputCols() == {"logit": "logits", "embedding": 1}
    assert estimator.getFeaturesAsKwargs()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--estimator.epoch_count", "3"],
        ["--estimator.model.init_args.epoch_count", "3"],
        ["--session.epoch_count", "3"],
        ["--epoch_count", "3"],
    ],
)
def test_a_wrong_key_on_the_command_line_is_named(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        read_config(["--config", CONFIG, *arguments])
    assert caught.value.code == 2
    assert "epoch_count" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "wrong"), [("epochs:", "epoch_count:"), ("regression:", "epoch_count:")]
)
def test_a_wrong_key_in_the_file_is_named(key, wrong, tmp_path, capsys):
    file = tmp_path / "wrong.yaml"
    file.write_text(Path(CONFIG).read_text().replace(key, wrong))
    with pytest.raises(SystemExit) as caught:
        read_config(["--config", str(file)])
    assert caught.value.code == 2
    assert "epoch_count" in capsys.readouterr().err


def test_a_network_for_another_number_of_features_is_refused_before_spark_starts(capsys):
    with pytest.raises(SystemExit):
        read_config(["--config", CONFIG, "--estimator.model.init_args.numeric_size", "5"])
    assert "numeric_size 5" in capsys.readouterr().err


@pytest.mark.parametrize("months", [((1, 11), (11, 12)), ((0, 3), (4, 5)), ((1, 2), (5, 4))])
def test_a_split_that_is_not_by_time_is_refused(months):
    with pytest.raises(ValueError, match="every test month after training"):
        Split(train_months=months[0], test_months=months[1])
