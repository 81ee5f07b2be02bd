"""Predictions for the rows of Parquet files, against predict_batch_udf and a bare torch loop.

``mlp``: 200,000 rows of 784 floats; ``cnn``: 90,000 encoded images; ``transformer``: 60,000 rows of
tokens, so that calls take seconds; in eight files, on local-cluster[2,1,2048]. Every measurement is
a process of its own with a fresh session, built by the user, which predicts for all rows several
times: the first call is timed from the DataFrame to the last row, later ones in rows per second.
The bare loop is two processes that read half of the files each with pyarrow, without Spark; its
first call is not compared. All compute in float32 with one torch thread, give ten numbers per row,
and write none of them. The ratios are shown together with where the processor time of a later call
goes.
"""

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from networks import CASES, Case
from PIL import Image
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, FloatType
from round_processes import RoundProcesses

from sparkdl.testing import batches_of

FILES, WORKERS, CALLS = 8, 2, 4
OURS = "sparkdl"
PEER, BARE = "predict_batch_udf", "bare loop"
AGAINST_PEER, AGAINST_BARE, FIRST_CALL = 1.3, 0.85, 1.0
Measured = dict[str, Any]
"""``calls``: the seconds of each; ``processor``: processor seconds of each by kind of process."""


def main() -> None:
    """Measures what is asked for, and reports, or is one of the measurements."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        name: (partial(predictions, case), 3, 1) for name, case in CASES.items()
    }
    harness.measure_parts("inference", harness.parser(__doc__), parts, child=measure)


def predictions(case: Case, chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures one network."""
    rows = case.rows // 10 if chosen.quick else case.rows
    environment = harness.child_environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), case, rows)
        child = partial(harness.call_child, environment=environment)
        turns = {way: partial(child, __file__, way, case.name, folder) for way in WAYS}
        runs = harness.interleave(turns, repeats=chosen.repeats)
    return compared(case.name, rows, runs), {"rows": rows, "seconds": runs}


def compared(name: str, rows: int, runs: Mapping[str, list[Measured]]) -> list[harness.Claim]:
    """Shows the medians and returns the claims about them."""
    calls = {way: [run["calls"] for run in each] for way, each in runs.items()}
    first = harness.show_each(
        {way: [run[0] for run in each] for way, each in calls.items()}, f"{name}, {{}}, first call"
    )
    speed = harness.show_each(
        {way: [rows / statistics.median(run[1:]) for run in each] for way, each in calls.items()},
        f"{name}, {{}}",
        unit="rows/s",
        digits=0,
    )
    for way, each in runs.items():
        later = [call for run in each for call in run["processor"][1:]]
        spent = {kind: [call[kind] for call in later] for kind in later[0]}
        harness.show_each(spent, f"{name}, {way}, processor time of a call, {{}}", digits=2)
    claims = [
        harness.claim(
            f"{name}: rows/s / {other}", speed[OURS], speed[other], target=target, at_least=True
        )
        for other, target in ((PEER, AGAINST_PEER), (BARE, AGAINST_BARE))
    ]
    of_first = f"{name}: first call / {PEER}"
    return [*claims, harness.claim(of_first, first[OURS], first[PEER], target=FIRST_CALL)]


def write(folder: Path, case: Case, rows: int) -> None:
    """Writes the rows of a case in files of equal size."""
    draws = np.random.default_rng(7)
    for number in range(FILES):
        count = rows * (number + 1) // FILES - rows * number // FILES
        if case.image:
            images = [_image(draws, case.shape) for _ in range(count)]
            table = pa.table({"x": pa.array(images, pa.binary())})
        else:
            table = pa.Table.from_batches(batches_of(count, x=case.draw(draws, count)))
        pq.write_table(table, folder / f"{number}.parquet", use_dictionary=False)


def _image(draws: np.random.Generator, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    pixels = draws.integers(0, 255, (shape[1], shape[2], shape[0]), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def measure(way: str, name: str, folder: str) -> Measured:
    """Measures one contender."""
    return WAYS[way](CASES[name], Path(folder))


def calls_of(call: Callable[[], object]) -> Measured:
    """Returns what several calls took."""
    calls, processor = zip(*(harness.timed(call) for _ in range(CALLS)), strict=True)
    return {"calls": [round(each, 4) for each in calls], "processor": processor}


def to_the_last_row(frame_of: Callable[[], DataFrame]) -> Callable[[], object]:
    """Returns a function that makes a DataFrame and computes its rows."""
    return lambda: frame_of().write.format("noop").mode("overwrite").save()


def session() -> SparkSession:
    """Returns a session whose executors are there."""
    spark = harness.session()
    spark.range(2).repartition(2).count()  # waits for the executors
    return spark


def ours(case: Case, folder: Path) -> Measured:
    """Predicts with ``TorchModel.transform``."""
    from sparkdl import TorchModel

    spark = session()
    model = TorchModel.from_module(
        case.build(),
        case.example(),
        featuresCol="x",
        imageCols=["x"] if case.image else [],
        predictionDtype="float32",
    )
    rows = partial(spark.read.parquet, str(folder))
    return calls_of(to_the_last_row(lambda: model.transform(rows()).select("prediction")))


def peer(case: Case, folder: Path) -> Measured:
    """Predicts with pyspark's ``predict_batch_udf``."""
    spark = session()
    module = spark.sparkContext.broadcast(case.build())

    def make() -> Callable[[np.ndarray], np.ndarray]:
        network = module.value.eval()
        torch.set_num_threads(1)

        def predict(inputs: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                predicted: np.ndarray = network(case.tensor(inputs)).numpy()
            return predicted

        return predict

    # Anything but arrays of numbers comes as an array of objects, without a shape.
    shapes = None if case.image else [[*case.shape]]
    predict = predict_batch_udf(
        make,
        return_type=ArrayType(FloatType()),
        batch_size=1024,
        input_tensor_shapes=shapes,
    )
    rows = partial(spark.read.parquet, str(folder))
    return calls_of(to_the_last_row(lambda: rows().select(predict("x"))))


def bare(case: Case, folder: Path) -> Measured:
    """Predicts in two processes without Spark; times reading and predicting, not the start."""
    with RoundProcesses(half, WORKERS, (case.name, folder)) as processes:
        return calls_of(processes.round)


def half(rank: int, name: str, folder: Path) -> tuple[Callable[[], None], torch.Tensor]:
    """Returns what one of the processes does in a call."""
    case, files = CASES[name], sorted(folder.glob("*.parquet"))[rank::WORKERS]
    module = case.build().eval()

    def predict() -> None:
        with torch.inference_mode():
            for path in files:
                for batch in pq.ParquetFile(path).iter_batches(1024):
                    module(case.tensor(_numpy_of(batch.column(0), case))).numpy()

    return predict, torch.empty(0)


def _numpy_of(column: pa.Array, case: Case) -> np.ndarray:
    if case.image:
        return np.array(column.to_pylist(), dtype=object)
    values: np.ndarray = column.flatten().to_numpy()
    return values.reshape(len(column), *case.shape)


WAYS: Mapping[str, Callable[[Case, Path], Measured]] = {
    OURS: ours,
    PEER: peer,
    BARE: bare,
}

if __name__ == "__main__":
    main()
