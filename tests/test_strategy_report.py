"""What the benchmark of strategies keeps, and makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks/studies"))
import strategy_report as report
from strategy_report import Run

POINTS = [(0, 0.0, 0.0, 2.0), (100, 1.0, 5.0, 1.0), (200, 2.5, 9.0, 0.5)]
RUNS = [
    Run(("digits", 100, 4, "slow", 0), POINTS),
    Run(("digits", 1000, 4, "slow", 0), [(r, s / 5, m, loss) for r, s, m, loss in POINTS]),
    Run(("digits", 100, 4, "fast", 0), [(r, s / 2, m, loss) for r, s, m, loss in POINTS]),
    Run(("digits", 1000, 4, "fast", 0), POINTS[:2]),
    Run(("digits", 1000, 4, "fast", 1), POINTS[:2]),
    Run(("digits", 1000, 4, "fast", 2), POINTS),
]


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "runs.jsonl"
    assert report.read(path) == {}
    report.write(path, RUNS)
    kept = report.read(path)
    assert set(kept) == {run.key for run in RUNS}
    assert kept[RUNS[0].key].to(1.5) == list(POINTS[1])


def test_a_target_is_reached_at_the_first_loss_that_is_no_more() -> None:
    assert RUNS[0].to(1.0) == POINTS[1]
    assert RUNS[0].to(0.4) is None


def test_the_table_has_a_dash_where_half_of_the_runs_were_never_there() -> None:
    lines = report.table(RUNS, ["slow", "fast", "absent"], {"digits": 0.5}).splitlines()
    assert lines[0] == (
        "| strategy | digits: loss after 100 rows at 1 Gbit/s | MB to 0.5 there "
        "| s at 100 Mbit/s | s at 1 Gbit/s |"
    )
    assert lines[2:] == [
        "| slow | 1.000 | 9.0 | 2.5 | 0.5 |",
        "| fast | 1.000 | - | 1.2 | - |",
        "| absent | - | - | - | - |",
    ]


def test_the_best_is_who_comes_first_to_the_target() -> None:
    runs = [*RUNS, Run(("digits", 100, 4, "all-reduce", 0), [(0, 0, 0, 2.0), (9, 5.0, 0, 0.1)])]
    best = report.best_over_all_reduce(runs, "digits", 100, {"digits": 0.5})
    assert (best.name, best.ratio) == ("fast", pytest.approx(0.25))
    assert best.seconds == {"slow": 2.5, "fast": 1.25, "all-reduce": 5.0}


def test_all_reduce_that_was_never_there_took_at_least_as_long_as_it_ran() -> None:
    runs = [*RUNS, Run(("digits", 100, 4, "all-reduce", 0), [(0, 0, 0, 2.0), (9, 2.5, 0, 1.1)])]
    assert report.best_over_all_reduce(runs, "digits", 100, {"digits": 0.5}).ratio == 0.5
    assert report.best_over_all_reduce(runs, "digits", 100, {"digits": 0.1}).name == "nobody"


def test_an_epoch_s_seconds_are_shown_of_who_ran_with_all_numbers_of_workers() -> None:
    runs = [*RUNS, Run(("digits", 100, 2, "slow", 0), [(r, 2 * s, m, x) for r, s, m, x in POINTS])]
    assert report.table_by_workers(runs, "digits", 100).splitlines() == [
        "| strategy | 2 workers | 4 workers |",
        "| --- | --- | --- |",
        "| slow | 3.00 | 1.50 |",
    ]


def test_a_page_gets_a_text_in_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin: x -->\nold\n<!-- end: x -->\nb\n")
    report.insert(page, "x", "new")
    report.insert(page, "x", "newer")
    assert page.read_text() == "a\n<!-- begin: x -->\n\nnewer\n\n<!-- end: x -->\nb\n"
    with pytest.raises(ValueError, match="no lines <!-- begin: y -->"):
        report.insert(page, "y", "")
