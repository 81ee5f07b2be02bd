"""The table of models and metrics has honest words."""

from __future__ import annotations

from sparkdl.jobs.evaluate import Score, format_scores

LARGER = {"AUC": True, "log-loss": False}


def table(auc: float, log_loss: float) -> str:
    scores = [
        Score(name="constant", metrics={"AUC": 0.5, "log-loss": 0.7}, seconds=1.0),
        Score(name="baseline", metrics={"AUC": 0.7, "log-loss": 0.5}, seconds=1.0),
        Score(name="network", metrics={"AUC": auc, "log-loss": log_loss}, seconds=2.0),
    ]
    return format_scores(scores, LARGER)


def test_the_table_says_when_the_network_does_not_win() -> None:
    assert "beats every baseline on AUC and log-loss." in table(0.71, 0.49)
    assert "beats every baseline on AUC, but not on log-loss." in table(0.71, 0.5)
    assert "beats every baseline on log-loss, but not on AUC." in table(0.7, 0.49)
    assert "does not beat the best baseline on AUC or log-loss." in table(0.69, 0.51)


def test_columns_are_as_wide_as_their_names() -> None:
    lines = table(0.71, 0.49).splitlines()
    assert lines[0].split() == ["model", "AUC", "log-loss", "seconds"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[3].split() == ["network", "0.7100", "0.4900", "2.0"]


def test_without_baselines_there_is_nothing_to_say() -> None:
    only = Score(name="network", metrics={"AUC": 0.7, "log-loss": 0.5}, seconds=1.0)
    assert "beat" not in format_scores([only], LARGER)
