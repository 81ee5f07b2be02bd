"""What a training function saves comes back, whole or not at all, and without running code."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdl.checkpoint.state_files import STATE_FILE, load_state, save_state
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import CheckpointError, ConfigError


def test_modules_optimizers_and_plain_values_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = str(tmp_path / "run")

    save_state(
        CheckpointStore(path, keep_last=1),
        {"model": model, "optimizer": optimizer, "epoch": 3, "best": [0.5]},
    )

    state = load_state(path)
    assert state is not None
    assert (state["epoch"], state["best"]) == (3, [0.5])
    again = nn.Linear(3, 2)
    again.load_state_dict(state["model"])
    assert torch.equal(again.weight, model.weight)
    moments = state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(moments, optimizer.state[model.weight]["exp_avg"])


def test_there_is_nothing_before_the_first(tmp_path: Path) -> None:
    assert load_state(str(tmp_path)) is None


def test_the_newest_undamaged_one_is_loaded_and_old_ones_are_deleted(tmp_path: Path) -> None:
    for epoch in range(1, 5):
        save_state(CheckpointStore(str(tmp_path), keep_last=2), {"epoch": epoch})
    directories = sorted(entry.name for entry in tmp_path.iterdir())
    assert directories == ["checkpoint-000003", "checkpoint-000004"]
    assert load_state(str(tmp_path)) == {"epoch": 4}
    (tmp_path / "checkpoint-000004" / STATE_FILE).write_bytes(b"damaged")
    assert load_state(str(tmp_path)) == {"epoch": 3}


def test_what_could_only_be_read_by_running_code_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"fractions\.Fraction.*state_dict"):
        save_state(CheckpointStore(str(tmp_path), keep_last=1), {"loss": Fraction(1, 3)})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_somebody_else_wrote_is_refused_in_words(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, octets in enumerate(
        [b"", b"no file of torch's", b"cposix\nsystem\n(Vtouch touched\ntR.", b"\x80\x02]q\x00."]
    ):
        with subtests.test(octets=octets), pytest.MonkeyPatch.context() as monkeypatch:
            directory = tmp_path / str(number)
            directory.mkdir()
            monkeypatch.chdir(directory)
            pending = CheckpointStore(str(directory / "run"), keep_last=1).begin()
            with pending.create(STATE_FILE) as file:
                file.write(octets)
            pending.publish({"kind": "state of a training function"})
            with pytest.raises(CheckpointError, match="checkpoint-000001"):
                load_state(str(directory / "run"))
            assert not (directory / "touched").exists()


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    pending = CheckpointStore(str(tmp_path), keep_last=1).begin()
    pending.publish({"kind": "other"})
    with pytest.raises(ConfigError, match=r"not a checkpoint of a training function.*other"):
        load_state(str(tmp_path))


def test_a_file_that_torch_cannot_read_is_an_error_of_ours(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, octets in enumerate([b"", b"PK\x03\x04 and no more", pickle.dumps(Fraction(1, 3))]):
        with subtests.test(octets=octets):
            directory = tmp_path / str(number)
            directory.mkdir()
            pending = CheckpointStore(str(directory), keep_last=1).begin()
            with pending.create(STATE_FILE) as file:
                file.write(octets)
            pending.publish({"kind": "state of a training function"})
            with pytest.raises(CheckpointError, match="cannot be read"):
                load_state(str(directory))


def test_a_full_disk_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(CheckpointStore(str(tmp_path), keep_last=1), {"epoch": 1})
    monkeypatch.setattr("sparkdl.durable.manifest.Checksummed.write", _full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_state(CheckpointStore(str(tmp_path), keep_last=1), {"epoch": 2})
    assert load_state(str(tmp_path)) == {"epoch": 1}


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")
