"""Settings that a checkpoint is of, compared with those of the training at hand."""

from __future__ import annotations

import pytest
from torch import nn

from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.policy import require_same
from sparkdl.errors import CheckpointError, ConfigError


def test_a_checkpoint_that_says_nothing_of_its_training_is_refused_in_words(
    subtests: pytest.Subtests,
) -> None:
    for loss in [
        {},
        {"is": "MSELoss()"},
        {**describe(nn.MSELoss()), "parts": {}, "is": None},
        {**describe(nn.MSELoss()), "parts": 7},
    ]:
        with (
            subtests.test(loss=loss),
            pytest.raises(CheckpointError, match="here does not say what training it belongs to"),
        ):
            require_same("here", {"loss": loss}, {"loss": describe(nn.MSELoss())})


def test_texts_that_differ_in_the_end_of_the_last_line_are_told_apart() -> None:
    now = describe(nn.MSELoss())
    with pytest.raises(ConfigError, match="loss: was MSELoss"):
        require_same("here", {"loss": {**now, "is": now["is"] + "\n", "parts": {}}}, {"loss": now})
