"""Time of one averaging round, against gloo reduce + broadcast and Spark broadcast + treeReduce.

Two workers contribute float32 parameters and receive their average; for all three contenders the
clock runs from the start until the last worker has the result. Rounds are interleaved. gloo has a
third rank in place of the driver; Spark runs on local-cluster[2,1,2048] and keeps its workers warm.
"""

import os
import tempfile
from pathlib import Path

import averager_rounds
import harness
from peers import gloo_round, spark_round
from pyspark.sql import SparkSession

WORKERS = 2
LARGE = 25_000_000
SMALL = 10_000
CONF = {
    "spark.executor.memory": "2048m",
    "spark.driver.memory": "4g",  # the classic way collects every vector in the driver
    "spark.driver.maxResultSize": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def main() -> None:
    """Measures both sizes and reports."""
    chosen = harness.arguments(__doc__, repeats=15, quick_repeats=5)
    os.environ.update(harness.child_environment())
    spark = harness.session(f"local-cluster[{WORKERS},1,2048]", CONF)
    measured = {numel: measure(spark, numel, chosen.repeats) for numel in (LARGE, SMALL)}
    spark.stop()
    medians = {
        numel: {
            name: harness.show(f"{name}, {numel:,} parameters", seconds)
            for name, seconds in by_name.items()
        }
        for numel, by_name in measured.items()
    }
    harness.report(
        "averaging_round",
        claims(medians),
        {"median_seconds": medians, "seconds": measured},
    )


def measure(spark: SparkSession, numel: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by contender."""
    with (
        tempfile.TemporaryDirectory() as folder,
        averager_rounds.rounds(WORKERS, numel) as ours,
        gloo_round.rounds(WORKERS, numel, Path(folder)) as gloo,
    ):
        turns = {
            "sparkdl": ours.round,
            "gloo": gloo.round,
            "spark": spark_round.SparkRounds(spark, WORKERS, numel).round,
        }
        return harness.interleave(turns, repeats=repeats, warmups=2)


def claims(medians: dict[int, dict[str, float]]) -> list[harness.Claim]:
    """Returns the bounds that the medians, by size and contender, are held to."""
    large, small = medians[LARGE], medians[SMALL]
    return [
        harness.Claim(
            name=f"sparkdl / gloo, {LARGE:,} parameters",
            ratio=large["sparkdl"] / large["gloo"],
            target=1.5,
        ),
        harness.Claim(
            name=f"spark / sparkdl, {LARGE:,} parameters",
            ratio=large["spark"] / large["sparkdl"],
            target=8,
            at_least=True,
        ),
        harness.Claim(
            name=f"spark / sparkdl, {SMALL:,} parameters",
            ratio=small["spark"] / small["sparkdl"],
            target=20,
            at_least=True,
        ),
    ]


if __name__ == "__main__":
    main()
