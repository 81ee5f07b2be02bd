"""One declaration a Param: constructors and stubs say what the tables say."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from stubs import FOLDER, MODULES, written

from sparkdl import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.estimator.params.declaration import GROUPS

USER = """
from functools import partial
import torch
from sparkdl import TorchClassifier, TorchEstimator, TorchModel, TorchRegressor
sgd = partial(torch.optim.SGD, lr=0.1)
mse = torch.nn.MSELoss()
estimator = TorchEstimator(model=torch.nn.Linear(1, 1), loss=mse, optimizer=sgd, epochs=3)
epochs: int = estimator.setEpochs(4).setNumWorkers(None).getEpochs()
TorchClassifier(model=torch.nn.Linear(1, 2), optimizer=sgd, labels=["a", "b"])
TorchRegressor(model=torch.nn.Linear(1, 1), optimizer=sgd, featuresCols=["x"])
precision: str = TorchModel.load("there").setPredictPrecision("bfloat16").getPredictPrecision()
"""
WRONG = [
    "estimator.setEpochs('4')",
    "TorchEstimator(model=torch.nn.Linear(1, 1), loss=mse, optimizer=sgd, epoch=3)",
    "TorchEstimator(loss=mse, optimizer=sgd)",
    "TorchRegressor(model=torch.nn.Linear(1, 1), optimizer=sgd, outputType='raw')",
    "TorchClassifier(model=torch.nn.Linear(1, 1), optimizer=sgd, epochs='3')",
]


@pytest.mark.nightly
def test_a_users_strict_mypy_takes_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USER + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    first = USER.count("\n") + 1
    refused = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert refused == set(range(first, first + len(WRONG))), done.stdout + done.stderr


def test_stubs_are_what_the_declarations_say() -> None:
    """``PYTHONPATH=. python tests/estimator/params/stubs.py`` writes them anew."""
    old = [each for each in MODULES if (FOLDER / f"{each}.pyi").read_text() != written(each)]
    assert old == []


def test_the_docstring_lists_the_constructors_arguments_in_its_order_by_group() -> None:
    text = inspect.getdoc(TorchEstimator) or ""
    listed = re.findall(r"^    (\w+): ", text.partition("Raises:")[0], re.M)
    assert listed == list(inspect.signature(TorchEstimator.__init__).parameters)[1:]
    groups = [each.group for each in TorchEstimator.declarations.values()]
    assert [group for group, _ in groupby(groups)] == list(GROUPS[:-1])
    for kind in (TorchClassifier, TorchRegressor):
        assert re.search(r"^    loss: ", inspect.getdoc(kind) or "", re.M)
        assert not re.search(r"^    epochs: ", inspect.getdoc(kind) or "", re.M)
