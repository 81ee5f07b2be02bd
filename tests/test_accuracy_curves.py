"""When a training reaches an accuracy, as benchmarks/time_to_accuracy.py finds out."""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import accuracy_curves
import digits
from accuracy_curves import crossing, fits, judged, take, take_module

LABELS = [3, 3, 3, 7]


def always(label: int) -> nn.Sequential:
    """An MLP that sees the same digit in everything."""
    model = digits.build_mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        last = model[-1]
        assert isinstance(last, nn.Linear)
        last.bias[label] = 1.0
    return model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    features = [[0.0] * digits.PIXELS for _ in LABELS]
    table = pa.table({"features": pa.array(features, pa.list_(pa.float32())), "label": LABELS})
    pq.write_table(table, folder / "test.parquet")
    return folder


def test_the_first_snapshot_that_reaches_the_accuracy_counts_though_later_ones_fall_back() -> None:
    assert crossing([(1.0, 0.94), (2.0, 0.95), (3.0, 0.93), (4.0, 0.97)], 0.95) == 2.0


def test_a_training_that_never_reaches_the_accuracy_has_no_crossing() -> None:
    assert crossing([(1.0, 0.9), (2.0, 0.949)], 0.95) is None


def test_snapshots_are_judged_as_the_model_was_then_in_the_order_of_time(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = always(7)
    # As text, 1000.5 comes before 999.25.
    for moment, label in ((999.25, 7), (1000.5, 3)):
        clock = SimpleNamespace(time=lambda moment=moment: moment)
        monkeypatch.setattr(accuracy_curves, "time", clock)
        model.load_state_dict(always(label).state_dict())
        take_module(tmp_path, model)
    assert judged(tmp_path, 990.0, data) == [(9.25, 0.25), (10.5, 0.75)]


def test_a_snapshot_of_arrays_is_one_of_the_module_with_these_parameters(
    tmp_path: Path, data: Path
) -> None:
    take(tmp_path, [np.asfortranarray(each.detach()) for each in always(3).parameters()])
    assert [accuracy for _, accuracy in judged(tmp_path, time.time(), data)] == [0.75]


def test_a_fit_that_took_another_number_of_snapshots_than_epochs_is_no_result(data: Path) -> None:
    def fit(data: Path, snapshots: Path, *, epochs: int) -> None:
        take_module(snapshots, always(3))

    with pytest.raises(RuntimeError, match="1 snapshots of 2 epochs"):
        fits(fit, data, [{"epochs": 2}])


def test_the_plot_is_drawn_with_a_contender_that_never_gets_there(tmp_path: Path) -> None:
    import accuracy_plot

    runs: dict[str, Any] = {
        name: [[{"curve": [(1.0, 0.8), (2.0, best)]}, {"curve": [(0.5, 0.8), (1.0, best)]}]]
        for name, best in (("sparkdl", 0.96), ("elephas", 0.9))
    }
    accuracy_plot.draw(runs, 0.95, tmp_path / "curves.svg")
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
