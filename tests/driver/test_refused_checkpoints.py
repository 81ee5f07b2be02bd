"""A checkpoint that this training cannot go on from is refused in words."""

from __future__ import annotations

import errno
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import OPTIMIZERS, policy
from toys import classification, cnn, make_job, mlp, schema

from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.service.saving import ResumedCheckpoint
from sparkdl.checkpoint.state_files import save_state
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver import as_builder
from sparkdl.driver.resuming import require_progress, require_same_rows
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
            "scheduler: was none, is now StepLR epoch .*'step_size': 2",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.2)},
            "lr of parameter group 0: was 0.1, is now 0.2",
        ),
        ({"strategy": ParameterAveraging(period=3)}, "strategy: was .*period=1.*now .*period=3"),
        ({"model": mlp(classes=4)}, "state: was .*, 83.*, is now .*, 92"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_another_training_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = classification([12, 8])
    run_world(make_job(mlp()), data.shards(), checkpoints=policy(tmp_path / "c"))
    other = make_job(changes.pop("model", None) or mlp(), **changes)
    with pytest.raises(ConfigError, match=message):
        run_world(other, data.shards(), checkpoints=policy(tmp_path / "c"))


def test_another_order_of_values_in_memory_is_refused_in_words(tmp_path: Path) -> None:
    data = classification([12, 8], width=36)
    job = make_job(cnn(), schema=schema(36))
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    other = replace(job, model=as_builder(cnn().to(memory_format=torch.channels_last)))
    with pytest.raises(ConfigError, match=r"strides of 4.weight: was none, is now \[16, 1, 8, 4\]"):
        run_world(other, data.shards(), checkpoints=policy(tmp_path / "c"))


def test_another_number_of_workers_is_refused_in_words(tmp_path: Path) -> None:
    run_world(make_job(mlp()), classification([6, 6]).shards(), checkpoints=policy(tmp_path / "c"))
    with pytest.raises(ConfigError, match="number of workers: was 2, is now 3"):
        run_world(
            make_job(mlp()), classification([4, 4, 4]).shards(), checkpoints=policy(tmp_path / "c")
        )


def test_other_rows_are_refused_in_words(tmp_path: Path) -> None:
    run_world(make_job(mlp()), classification([6, 6]).shards(), checkpoints=policy(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"rows of each worker: was \[6, 6\], is now \[6, 7\]"):
        run_world(
            make_job(mlp()), classification([6, 7]).shards(), checkpoints=policy(tmp_path / "c")
        )


def test_an_unreadable_directory_ends_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))
    monkeypatch.setattr("sparkdl.durable.manifest.FORMAT", 0)
    with pytest.raises(CheckpointError, match="newer than the 0"):
        run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))


def test_a_checkpoint_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    save_state(CheckpointStore(str(tmp_path / "c"), keep_last=1), {"epoch": 3})
    with pytest.raises(CheckpointError, match=r"not a checkpoint of a fit: .*training function"):
        run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))


def test_a_checkpoint_of_other_workers_than_it_says_is_refused_in_words(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([6, 6])
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=1).newest()
    assert saved is not None
    saved.description["progress"]["positions"].pop()
    with pytest.raises(
        CheckpointError, match="the progress of 1 workers, but says that there were 2"
    ):
        require_progress(ResumedCheckpoint.of(saved), 2, 2)


@pytest.mark.parametrize("data", [None, {}, {"openings": 7}, {"openings": []}, {"fingerprint": 1}])
def test_a_checkpoint_that_says_nothing_of_its_rows_is_refused_in_words(
    tmp_path: Path, data: dict[str, Any] | None
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    progress = Progress.start(1).as_json()
    store.begin().publish({"config": {}, "data": data, "progress": progress})
    saved = store.newest()
    assert saved is not None
    present = {**DataStatistics((3,), (), fingerprint=7).lasting(), "openings": [1]}
    with pytest.raises(CheckpointError, match="does not say which rows"):
        require_same_rows(ResumedCheckpoint.of(saved), present, ())


class Unreadable(io.BytesIO):
    """A file on a disk that has just failed."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_worker_state_that_cannot_be_read_any_more_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, data = make_job(mlp(), optimizer=OPTIMIZERS["Adam"]), classification([6])
    run_world(replace(job, epochs=1), data.shards(), checkpoints=policy(tmp_path))
    opened: list[str] = []
    original, worker_state = LocalFiles.open_input_stream, "rank-00000.safetensors"

    def open_input_stream(files: LocalFiles, path: str) -> Any:
        opened.append(Path(path).name)
        # It was whole when it was verified.
        failed = opened[-1] == worker_state and opened.count(worker_state) == 2
        return Unreadable() if failed else original(files, path)

    monkeypatch.setattr(LocalFiles, "open_input_stream", open_input_stream)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read: .*Input"):
        run_world(replace(job, epochs=2), data.shards(), checkpoints=policy(tmp_path))
