"""What one or two workers send to the averager, from joining to leaving."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import torch
from calling import Call, Message, Said, any_way, dialogue
from fuzzer import Fault, Target, require_threads_gone

from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.headers import window_header
from sparkdl.averager.service.saving import CheckpointPlan, Snapshot
from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES, FULL_PRECISION, WireFormat
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics, ShardStatistics, check_statistics
from sparkdl.protocols import ColumnSpec, Segment

LAYOUT = (
    Segment("parameters", torch.float32, 5),
    Segment("buffers", torch.int64, 2),
    Segment("optimizer", torch.float32, 3),
)
COLUMNS = (ColumnSpec("x", torch.float32), ColumnSpec("k", torch.int64, (2,)))
SHARD = ShardStatistics(
    3,
    (
        ColumnStatistics(smallest=0.5, largest=2, places={"smallest": (0, 1)}),
        ColumnStatistics(shortest=2, longest=2, smallest=0, largest=9, places={"shortest": (0, 0)}),
    ),
    held_out=1,
)
WRONG_DEADLINE_S = 0.1
"""Short, because some workers that send something wrong are rightly waited for."""
RIGHT_DEADLINE_S = 15.0
STATE_BYTES = 12
WORKERS = 2


class AveragerTarget(Target):
    """A whole run whose workers have the token but send messages that are wrong somewhere.

    Whatever they send, the run has to end properly or with an error of ours, at once and with a
    finite center.
    """

    name = "averager"

    def __enter__(self) -> AveragerTarget:
        self._pool = self.enter_context(ThreadPoolExecutor(1 + WORKERS))
        self._folder = self.folder()
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One run."""
        workers = draw.choice([1, 1, 1, WORKERS])
        saves = workers == 1 and draw.random() < 0.15
        wire_format: WireFormat = BFLOAT16_CHANGES if draw.random() < 0.3 else FULL_PRECISION
        steps = _steps(draw)
        said = [
            dialogue(draw, _messages(steps, rank, wire_format.name, saves=saves))
            for rank in range(workers)
        ]
        known = [draw.random() > 0.05 for _ in said]
        proved, good = all(known), all(known) and not any(wrong for _, wrong in said)
        with ExitStack() as stack:
            averager = stack.enter_context(
                Averager(
                    RunSpec(
                        world_size=workers,
                        deadline_s=RIGHT_DEADLINE_S if good else WRONG_DEADLINE_S,
                        tolerance=Tolerance(draw.choice([0] * 9 + [2])),
                        checkpoints=self._plan() if saves else None,
                    ),
                    CenterSpec(layout=LAYOUT, wire_format=wire_format),
                    Snapshot(center=[torch.ones(s.numel, dtype=s.center_dtype) for s in LAYOUT]),
                    EdgeOptions(tls=draw.random() < 0.1),
                )
            )
            place = averager.address
            driver = self._pool.submit(_drive, averager)
            lines = [stack.enter_context(Call(place, any_way(draw))) for _ in range(workers)]
            spoken = [
                self._pool.submit(_speak, line, messages, None if knows else "wrong")
                for line, (messages, _), knows in zip(lines, said, known, strict=True)
            ]
            for each in spoken:
                each.result()
            error = self._outcome(averager, driver)
            if not all(bool(torch.isfinite(segment).all()) for segment in averager.center.values):
                raise Fault("the center has values that are not finite")
        require_threads_gone()
        if error is None and not proved:
            raise Fault("a run was finished by someone without the token")
        if error is not None and good:
            raise Fault("a run in which nothing was wrong failed", repr(error))
        if error is not None:
            raise error
        return True

    def _plan(self) -> CheckpointPlan:
        store = CheckpointStore(str(self._folder / "checkpoints"), keep_last=1)
        policy = CheckpointPolicy(path="", every_rounds=1)
        return CheckpointPlan(store=store, policy=policy, last_epoch=2, config={})

    @staticmethod
    def _outcome(averager: Averager, driver: Future[SparkDLError | None]) -> SparkDLError | None:
        with suppress(TimeoutError):
            driver.result(timeout=0.01)
        averager.fail(TrainingError("over"))  # dropped if the run has ended
        error = driver.result(timeout=15)
        if error is not None and "the averager's thread" in str(error):
            raise Fault(str(error)) from error
        return error


def _speak(line: Call, said: Sequence[Said], token: str | None) -> None:
    """Act as a worker of a run."""
    line.send(line.proof(line.hello(), token))
    line.converse(said)
    line.answer()


def _drive(averager: Averager) -> SparkDLError | None:
    """Act as the driver of a run; returns the error that it ends with."""
    try:
        for event in averager.events():
            if isinstance(event, DataStatistics):
                check_statistics(event, COLUMNS)
                averager.start()
            else:
                f"{event} {averager.progress.as_json()}"
    except SparkDLError as error:
        averager.fail(error)
        return error
    return None


def _steps(draw: random.Random) -> dict[str, Any]:
    """What the workers of a run do in each epoch, the same for all of them."""
    return {
        "asks": draw.random() < 0.2,
        "gathers": draw.random() < 0.3,
        "validates": draw.random() < 0.3,
        "windows": [draw.choice([1, 2, 3]) for _ in range(draw.choice([1, 2]))],
        "keeps": draw.random() < 0.5,
        "reads": draw.random() < 0.3,
        "group_weight": draw.choice([None, None, None, 2]),
        "measured": draw.choice([{}, {}, {"noise": 2.5}]),
        "weightless": draw.random() < 0.1,
        "takes_reply": draw.random() < 0.8,
    }


def _messages(steps: dict[str, Any], rank: int, wire_format: str, *, saves: bool) -> list[Said]:
    """Everything that a worker sends, if nothing is wrong with it."""
    said = [Said({"join": rank, "host": "h", "attempt": 0, "task": rank, "frozen": ""})]
    said += [Said({"alive": True})] * steps["reads"]
    # The header with everything else, and the center's parameters and buffers.
    said += [Said({"shard": asdict(SHARD)}, answers=3)]
    worker_state = [Said({"worker_state": STATE_BYTES}), Said(bytes(STATE_BYTES))] if saves else []
    step = 0
    for epoch, windows in enumerate(steps["windows"], 1):
        said += [Said({"gather": {"a": [1, None, "b"]}}, answers=1)] * steps["gathers"]
        for number in range(1, windows + 1):
            step += 1
            examples = 0 if steps["weightless"] and number > 1 else 2
            report = WindowReport(
                rank=rank,
                epoch=epoch,
                step=step,
                examples=examples,
                loss_sum=0.5,
                last=number == windows,
                step_of_epoch=number,
                group_weight=steps["group_weight"],
                measured=steps["measured"],
            )
            said += [*_contribution(steps, report, wire_format), *worker_state]
        if steps["asks"]:
            said += [Said({"rows": True}, answers=1)]
        if steps["validates"]:
            held_out = ValidationReport(rank=rank, epoch=epoch, examples=2, loss_sum=1.0, weight=2)
            said += [Said({"validation": asdict(held_out)})]
    return [*said, Said({"finish": True}, answers=1)]


def _contribution(steps: dict[str, Any], report: WindowReport, wire_format: str) -> list[Said]:
    """A window, after which the outcome is waited for."""
    kept = bytes(STATE_BYTES) if steps["keeps"] else b""
    messages: list[Message] = [
        window_header(report, takes_reply=steps["takes_reply"], worker_state=len(kept)),
        *([kept] if kept else []),
        *(_values(wire_format) if report.weight else []),
    ]
    answers = len(LAYOUT) if steps["takes_reply"] else 1
    return [*(Said(message) for message in messages[:-1]), Said(messages[-1], answers)]


def _values(wire_format: str) -> list[bytes]:
    """A contribution: each segment in one chunk."""
    narrow = torch.bfloat16 if wire_format == "bfloat16" else None
    sent = []
    for segment in LAYOUT:
        dtype = narrow if narrow is not None and segment.averaged else segment.dtype
        ones = torch.ones(segment.numel, dtype=dtype)
        sent.append(ones.view(torch.uint8).numpy().tobytes())
    return sent
