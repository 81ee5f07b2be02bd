"""What benchmarks make of their numbers, and that every script still starts."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from every_row import every
from subprocesses import printed_by
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import accuracy_curves
import digits
import time_to_accuracy
from accuracy_curves import crossing, fits, judged, take, take_module
from side_by_side import compare

FOLDER = Path(__file__).parent.parent / "benchmarks"
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
    """A training that never reaches it has none."""
    assert crossing([(1.0, 0.94), (2.0, 0.95), (3.0, 0.93), (4.0, 0.97)], 0.95) == 2.0
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


def test_a_search_ends_at_settings_whose_neighbours_were_tried_as_many_by_each_contender(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The best rates lie four steps above where the search begins, and three below it."""
    best = {"averaging_frame": 0.1 * 1.5**4, "one_process": 0.1 / 1.5**3}
    tried: dict[str, list[tuple[float, int]]] = {name: [] for name in best}

    def session(name: str, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        tried[name] += [(each["learning_rate"], each.get("threads", 0)) for each in plan]
        assert all(each["seed"] >= time_to_accuracy.SEARCH_SEEDS for each in plan)
        far = (math.log(each["learning_rate"] / best[name]) ** 2 for each in plan)
        threads = (each.get("threads", 0) for each in plan)
        return [{"curve": [(1 + a + b, 0.96)]} for a, b in zip(far, threads, strict=True)]

    found = time_to_accuracy.search({name: partial(session, name) for name in best}, 1)
    for name, rate in best.items():
        assert found[name]["learning_rate"] == pytest.approx(rate, rel=0.02)
    assert found["one_process"]["threads"] == 1
    frame, alone = ({*each} for each in tried.values())
    assert len(frame) == len(alone)
    for name, rates in (("averaging_frame", frame), ("one_process", alone)):
        assert min(rates)[0] < found[name]["learning_rate"] < max(rates)[0]
    assert "on an edge of what was tried: nobody" in capsys.readouterr().out


def run(**ratios: float) -> dict[str, Any]:
    """Claims of a run; of those named ``speed`` more is better."""
    bounds = {True: "at least", False: "at most"}
    return {
        name: {"name": name, "ratio": ratio, "bound": bounds[name == "speed"]}
        for name, ratio in ratios.items()
    }


def test_a_longer_time_and_a_lower_speed_are_worse() -> None:
    time, speed = compare([run(time=2.2, speed=2.0)], [run(time=2.0, speed=2.2)])
    assert time.ratio == pytest.approx(1.1)
    assert speed.ratio == pytest.approx(1.1)
    assert not time.met


def test_the_median_of_the_turns_counts() -> None:
    here = [run(time=1.0), run(time=9.0), run(time=1.02)]
    (claim,) = compare(here, [run(time=1.0)] * 3)
    assert claim.ratio == pytest.approx(1.02)
    assert claim.met


def test_nothing_in_both_is_no_worse_and_something_beside_nothing_is_any_number_of_times() -> None:
    none, some = compare([run(threads=0.0, memory=1.0)], [run(threads=0.0, memory=0.0)])
    assert none.ratio == 1.0
    assert some.ratio == float("inf")
    assert not some.met


def test_a_claim_that_only_one_of_them_makes_is_left_out() -> None:
    claims = compare([run(time=1.0, memory=3.0)], [run(time=1.0, speed=3.0)])
    assert [claim.name for claim in claims] == ["time, times worse than there"]


def test_two_without_a_claim_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no claim in common: here \['time'\]"):
        compare([run(time=1.0)], [run(speed=3.0)])


IN_ONE_PROCESS = """
import contextlib, importlib, io, runpy, sys, traceback

sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    try:
        # Of a module that is no script nothing runs but its definitions.
        with contextlib.redirect_stdout(said):
            runpy.run_path(name, run_name="__main__")
        problem = "" if "__main__" not in open(name).read() else "does not know --help"
    except SystemExit as end:
        problem = f"ends with {end.code}" if end.code or "usage:" not in said.getvalue() else ""
    except Exception:
        problem = traceback.format_exc()
    if problem:
        print(f"{name}: {problem}")
"""
"""torch and Spark are imported once for all of them: a process each would take three minutes."""


@pytest.mark.slow
def test_every_script_starts_and_has_a_help() -> None:
    scripts = sorted(map(str, FOLDER.glob("*.py")))
    assert len(scripts) > 40
    assert printed_by("-c", IN_ONE_PROCESS, FOLDER, *scripts, timeout=170) == ""


NOT_THERE = ("pyspark", "py4j", "pandas", "safetensors", "tqdm", "PIL", "cryptography")


@pytest.mark.slow
@every(
    ("script", "reports"),
    [
        ("resnet50", "all_reduce_one_rank_images_per_second"),
        ("averaging_round", "milliseconds_a_round"),
        ("training_loop", "rows_per_second"),
    ],
)
def test_those_for_gpus_run_at_toy_size_without_one_and_without_spark(
    tmp_path: Path, script: str, reports: str
) -> None:
    for name in NOT_THERE:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')")
    printed = printed_by(
        FOLDER / "gpu" / f"{script}.py",
        "--toy",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER.parent)])},
        timeout=150,
    )
    report = json.loads(printed.strip().splitlines()[-1])
    assert report["ratio"] > 0
    assert report["detail"]["toy"]
    assert report["detail"][reports]
