"""What the model and the rest come from is importable on executors that have never seen it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from frames import frame
from projects import NET, on_path, write
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import ParameterAveraging, TorchEstimator
from sparkdl.errors import WorkerError
from sparkdl.spark import shipping

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRANSFORM = """
def transform(batch):
    raise ValueError("this is version {}")
"""


KILLS_ONCE = """
import os, signal
from pathlib import Path

def transform(batch):
    try:
        Path("{}").touch(exist_ok=False)
    except FileExistsError:
        return batch
    os.kill(os.getpid(), signal.SIGKILL)
"""


KILLS_ITS_EXECUTOR_ONCE = """
import os, signal
from pathlib import Path
import own_place

def transform(batch):
    # A Python worker is a child of the daemon, which is a child of the executor.
    executor = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
    (own_place.FOLDER / str(executor)).touch()
    try:
        (own_place.FOLDER / "killed").touch(exist_ok=False)
    except FileExistsError:
        return batch
    os.kill(executor, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def estimator(model: Any, **changes: Any) -> TorchEstimator:
    given: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "numWorkers": 2,
        "progress": False,
    }
    return TorchEstimator(**{**given, **changes})


@pytest.mark.gate
def test_a_model_and_its_loss_are_found_by_fit_and_the_edited_model_by_transform(
    spark: SparkSession, project: Path, tmp_path: Path
) -> None:
    write(
        project,
        {
            "own_net/__init__.py": "from .model import Net",
            "own_net/model.py": f"{NET}\nfrom own_helper import POWER",
            "own_net/scale.py": "def scaled(x):\n    import own_lazy\n    return own_lazy.by * x",
            "own_helper.py": "POWER = 3",
            "own_lazy.py": "by = 2.0",
            "own_losses.py": "import torch\n\ndef loss(outputs, targets):\n"
            "    from own_net.scale import scaled\n"
            "    return torch.nn.functional.cross_entropy(scaled(outputs), targets)",
        },
    )
    write(project, {"own_killer.py": KILLS_ONCE.format(tmp_path / "killed")})
    own_net = importlib.import_module("own_net")
    own_losses = importlib.import_module("own_losses")
    own_killer = importlib.import_module("own_killer")
    rows = frame(spark)
    model = estimator(
        own_net.Net,
        loss=own_losses.loss,
        batchTransform=own_killer.transform,
        outputType="raw",
    ).fit(rows)
    assert (tmp_path / "killed").exists()  # a process that was started again has trained
    assert type(model.module) is own_net.Net

    def predicted() -> torch.Tensor:
        found = model.transform(rows).orderBy("id").select("prediction").collect()
        return torch.tensor([list(row.prediction) for row in found])

    before = predicted()
    assert torch.equal(predicted(), before)
    edited = NET.replace("self.layer(features)", "2 * self.layer(features)")
    write(project, {"own_net/model.py": edited}, when=1)
    importlib.reload(own_net.model)
    model.module.__class__ = own_net.model.Net
    assert torch.equal(predicted(), 2 * before)


@pytest.mark.nightly
def test_an_executor_in_the_place_of_one_that_was_killed_gets_the_modules_too(
    spark: SparkSession, project: Path, tmp_path: Path
) -> None:
    place = tmp_path / "executors"
    place.mkdir()
    write(
        project,
        {
            "own_net.py": NET,
            "own_place.py": f"from pathlib import Path\nFOLDER = Path({str(place)!r})",
            "own_killer.py": KILLS_ITS_EXECUTOR_ONCE,
        },
    )
    own_net = importlib.import_module("own_net")
    own_killer = importlib.import_module("own_killer")
    rows = frame(spark, rows=90)
    model = estimator(
        own_net.Net,
        strategy=ParameterAveraging(2),
        batchTransform=own_killer.transform,
        numWorkers=3,  # of three executors, so that one has to be started anew
        epochs=2,
        timeout=120.0,
    ).fit(rows)
    assert [epoch.examples for epoch in model.history] == [90, 90]
    executors = {path.name for path in place.iterdir()} - {"killed"}
    assert len(executors) == 4
    assert len(model.transform(rows).collect()) == 90


def test_each_fit_runs_the_code_that_the_driver_has_and_leaves_nothing_of_it(
    spark: SparkSession,
    project: Path,
    tmp_path: Path,
) -> None:
    rows = frame(spark)

    def fails_with(module: Any, text: str) -> str:
        with pytest.raises(WorkerError, match=text) as caught:
            estimator(lambda: nn.Linear(4, 3), batchTransform=module.transform).fit(rows)
        return str(caught.value)

    write(project, {"own_transform.py": TRANSFORM.format("one")})
    module = importlib.import_module("own_transform")
    told = fails_with(module, "this is version one")
    assert 'raise ValueError("this is version one")' in told  # the line of the source
    assert str(project / "own_transform.py") not in told
    write(project, {"own_transform.py": TRANSFORM.format("two")}, when=1)
    importlib.reload(module)
    fails_with(module, "this is version two")
    write(tmp_path / "other", {"own_transform.py": TRANSFORM.format("of another project")})
    del sys.modules["own_transform"]
    with on_path(tmp_path / "other"):
        fails_with(importlib.import_module("own_transform"), "of another project")

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        found = [name for name in sys.modules if name.startswith("own_")]
        found += [type(each).__name__ for each in sys.meta_path if "Arrived" in str(type(each))]
        found += [each for each in sys.path if "sparkdl-modules" in each or "project" in each]
        yield pa.record_batch([pa.array([str(found)])], names=["found"])

    left = spark.range(0, 3, 1, 3).mapInArrow(look, "found string").collect()
    assert not any("own_" in row.found or "Arrived" in row.found for row in left), left
    assert not any("sparkdl-modules" in row.found for row in left), left


@pytest.mark.nightly
def test_a_function_has_its_module_its_data_and_its_classes(
    spark: SparkSession, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        project,
        {
            "own_work/__init__.py": "",
            "own_work/words.txt": "some words",
            "own_work/train.py": """
import dataclasses, inspect, os, subprocess, sys
from pathlib import Path

@dataclasses.dataclass
class Result:
    words: str
    source: str
    modes: list
    child: str

def train(folder):
    here = Path(__file__)
    child = "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); import own_work.train"
    import pickle
    subprocess.run([sys.executable, "-c", child], input=pickle.dumps(sys.path), check=True)
    return Result(
        (here.parent / "words.txt").read_text(),
        inspect.getsource(Result),
        [os.stat(each).st_mode & 0o777 for each in [here.parents[1]]],
        str(here),
    )
""",
        },
    )
    train = importlib.import_module("own_work.train")
    results = sparkdl.run(train.train, str(project), num_workers=2)
    sent = shipping._sent_last
    assert {type(result) for result in results} == {train.Result}
    for result in results:
        assert result.words == "some words"
        assert result.source.startswith("@dataclasses.dataclass\nclass Result:")
        assert result.modes == [0o700]
        assert "sparkdl-modules-" in result.child

    def import_inside() -> str:
        import own_work.train  # type: ignore[import-not-found]

        return str(own_work.train.Result.__name__)

    assert sparkdl.run(import_inside, num_workers=1) == ["Result"]
    # Nothing has changed: the same broadcast served both.
    assert sent is not None
    assert shipping._sent_last is sent
    with pytest.raises(WorkerError, match=r"No module named 'own_work'\n.*addPyFile"):
        sparkdl.run(import_inside, num_workers=1, shipModules=False)
    write(project, {"own_work/fast.abi3.so": ""})
    with pytest.raises(WorkerError, match=r"own_work has a compiled part.*spark\.archives"):
        sparkdl.run(import_inside, num_workers=1)
    assert "has a compiled part (own_work/fast.abi3.so), so it is not sent" in caplog.text


@pytest.mark.gate
def test_a_script_has_the_modules_beside_it_as_they_are_on_the_driver(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edited since the run before, and of the same name in another project."""
    for when, (project, said) in enumerate((("here", "one"), ("here", "two"), ("there", "three"))):
        files = {
            "train.py": "import own_beside; print(own_beside.SAYS, own_beside.__file__)",
            "own_beside.py": "import own_next; SAYS = own_next.SAYS",
            "own_next.py": f"SAYS = {said!r}",
        }
        write(tmp_path / project, files, when=when)
        sparkdl.run(str(tmp_path / project / "train.py"), num_workers=1)
        (line,) = [each for each in capsys.readouterr().out.splitlines() if "[rank 0]" in each]
        assert f"[rank 0] {said} " in line
        assert "sparkdl-modules-" in line
    assert "own_beside" not in sys.modules


def test_a_fit_and_its_model_can_be_told_to_send_nothing(
    spark: SparkSession, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"own_net.py": NET})
    own_net = importlib.import_module("own_net")
    asked: list[set[str]] = []
    monkeypatch.setattr(shipping, "collect", lambda names, *_, **__: asked.append(set(names)))
    fitted = estimator(own_net.Net, shipModules=False)
    with pytest.raises(WorkerError, match=r"No module named 'own_net'\n.*addPyFile"):
        fitted.fit(frame(spark))
    assert asked == []
    assert fitted.getShipModules() is False
