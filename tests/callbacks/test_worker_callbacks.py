"""Callbacks on workers see each step, may change it, and end the fit with their name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from toys import batches_by_hand, classification, make_job, mlp

from sparkdl.callbacks import Callback, WorkerCallback, WorkerStep
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.strategies import ElasticAveraging, GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.worker import Job

SIZES = [11, 6]
EPOCHS = 2


class Log(WorkerCallback):
    """Writes each step down, of each rank to a file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.before: dict[str, Any] = {}

    def before_step(self, step: WorkerStep) -> None:
        assert step.loss is None
        assert step.examples == 0
        self.before[f"{step.rank}"] = step.step, next(step.model.parameters()).clone()

    def after_step(self, step: WorkerStep) -> None:
        number, weights = self.before[f"{step.rank}"]
        assert number == step.step
        line = {
            **{
                name: getattr(step, name) for name in ("epoch", "step", "step_of_epoch", "examples")
            },
            "loss": None if step.loss is None else float(step.loss),
            "moved": not torch.equal(weights, next(step.model.parameters())),
            "optimizer": type(step.optimizer).__name__,
        }
        with (self.directory / f"{step.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{rank}").read_text().splitlines()]


@every_row(
    (ParameterAveraging(2), 1), (ElasticAveraging(), 1), (GradientAllReduce(accumulate=2), 2)
)
def test_each_step_is_told_of_with_its_rows_and_its_loss(
    tmp_path: Path, strategy: Any, a_step: int
) -> None:
    job = make_job(mlp(), epochs=EPOCHS, strategy=strategy, deadline_s=120.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    run = partial(run_world, shards=classification(SIZES).shards(), ranks_as=ranks_as)
    outcome = run(replace(job, callbacks=(Log(tmp_path),)))
    assert all(map(torch.equal, outcome.module.parameters(), run(job).module.parameters()))
    told = [line for rank in range(2) for line in lines(tmp_path, rank)]
    for summary in outcome.history:
        of_epoch = [line for line in told if line["epoch"] == summary.epoch]
        rows = sum(line["examples"] for line in of_epoch)
        loss = sum(line["examples"] * line["loss"] for line in of_epoch if line["examples"])
        assert rows == sum(SIZES) == summary.examples
        assert loss / rows == pytest.approx(summary.loss, rel=1e-12)
    first = lines(tmp_path, 0)
    steps = -(-11 // (4 * a_step))
    assert [line["step"] for line in first] == list(range(1, EPOCHS * steps + 1))
    assert [line["step_of_epoch"] for line in first] == [*range(1, steps + 1)] * EPOCHS
    assert all(line["moved"] and line["optimizer"] == "SGD" for line in told)
    # In step with the others a worker goes on when its own rows are used up.
    assert any(line["loss"] is None for line in told) == strategy.needs.collective


class Halved(WorkerCallback):
    """Halves the learning rate before the third step."""

    def before_step(self, step: WorkerStep) -> None:
        if step.step == 3:
            step.optimizer.param_groups[0]["lr"] /= 2


def test_what_a_callback_changes_is_part_of_the_training(tmp_path: Path) -> None:
    job = make_job(mlp(), optimizer=partial(torch.optim.SGD, lr=0.2))
    shards = classification([16]).shards()
    policy = CheckpointPolicy(path=str(tmp_path))
    halved = run_world(replace(job, callbacks=(Halved(),)), shards, checkpoints=policy)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number, (x, y) in enumerate(batches_by_hand(classification([16]), 0, 1, 4), 1):
        if number == 3:
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        outputs = model(torch.from_numpy(x))
        torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y)).backward()
        optimizer.step()
    for mine, other in zip(halved.module.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=0)
    with pytest.raises(ConfigError, match="callbacks on workers: was "):
        run_world(job, shards, checkpoints=policy)


@every("hook", ["before_step", "after_step"])
def test_an_error_ends_the_fit_with_name_rank_and_step(hook: str) -> None:
    def fail(self: Any, step: WorkerStep) -> None:
        if step.rank == 1 and step.step == 2:
            raise KeyError("accuracy")

    broken = type("Broken", (WorkerCallback,), {hook: fail})()
    job: Job = make_job(mlp(), callbacks=(broken,))
    told = f"rank 1, epoch 1, step 2: .*callback Broken failed in {hook}: KeyError: 'accuracy'"
    with pytest.raises(WorkerError, match=told) as error:
        run_world(job, classification(SIZES).shards())
    assert "raise KeyError" in error.value.worker_traceback


class StepsAlone(ParameterAveraging):
    """Takes steps in a way of its own, and forgets to say that they were taken."""

    def train_epoch(self, run: Any, state: Any, batches: Any) -> None:
        for batch in batches:
            run.count_step()
            run.count(batch, run.replica.step(batch))
            self.after_step(run, state, batch)
        self.end_epoch(run, state)


def test_a_strategy_of_whose_steps_callbacks_would_not_hear_is_told_so() -> None:
    job = make_job(mlp(), strategy=StepsAlone(period=1))
    run_world(job, classification(SIZES).shards())
    watched = replace(job, callbacks=(Halved(),))
    with pytest.raises(WorkerError, match=r"step 2: .* call run\.end_step\(\) after"):
        run_world(watched, classification(SIZES).shards())


def test_a_method_that_would_never_be_called_on_workers_is_refused() -> None:
    for name in ("on_epoch", "after_epoch", "before_steps"):
        with pytest.raises(TypeError, match=f"Misspelt.{name} would never be called"):
            type("Misspelt", (WorkerCallback,), {name: lambda self, step: None})
    with pytest.raises(TypeError, match=r"Driver\.after_step would never be called"):
        type("Driver", (Callback,), {"after_step": lambda self, step: None})


def test_a_class_for_both_places_is_refused() -> None:
    with pytest.raises(TypeError, match="Both is called in the driver and on workers"):

        class Both(Callback, WorkerCallback):
            """Would count in two places, and know of one."""
