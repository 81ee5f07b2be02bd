"""jobs/plan.py: profiles become a table and a suggestion, or an exit code and a message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from every_row import every_row

sys.path.append(str(Path(__file__).parents[1] / "planner"))
from profiles import profile

from sparkdl.jobs.plan import main


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A profile of one worker as a fit's summary has it, and of two as a job's result."""
    paths = [tmp_path / "one.json", tmp_path / "_result.json"]
    paths[0].write_text(profile(1).to_json())
    paths[1].write_text(json.dumps({"profile": json.loads(profile(2).to_json())}))
    return [str(each) for each in paths]


def test_a_table_an_explanation_and_a_suggestion_are_printed(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--summary", *files, "--link", "1 Gbit/s"]) == 0
    printed = capsys.readouterr().out
    assert "measured with 1 and 2 workers" in printed
    assert "bound by" in printed
    assert "Best: numWorkers=" in printed


def test_json_has_the_same_for_programs(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--workers", "1", "4", "--rows", "1000000", "--json", "--max_period", "20"]
    assert main(["--summary", *files, *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    # in the driver, where both fits were
    assert [each["workers"] for each in printed["table"]] == [1, 4]
    assert printed["best"]["params"]["numWorkers"] in (1, 2, 3, 4)


@every_row(
    (["--link", "0 bit/s"], 2, "carries nothing"),
    (["--efficiency", "2"], 2, "efficiency must be"),
    (["--summary", "nowhere.json"], 7, "nowhere.json"),
    (["--summary", __file__], 2, "test_plan_job.py: this is no profile"),
)
def test_what_cannot_be_done_is_an_exit_code_and_a_message(
    files: list[str], capsys: Any, arguments: list[str], code: int, message: str
) -> None:
    assert main(["--summary", *files, *arguments]) == code
    assert message in capsys.readouterr().err
