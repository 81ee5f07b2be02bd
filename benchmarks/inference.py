"""Predictions for the rows of Parquet files, against predict_batch_udf and a bare torch loop.

200,000 rows for an MLP on 784 floats, 90,000 for a small CNN on encoded images and 60,000 for a
transformer encoder on tokens, so that calls take seconds; in eight files, on local-
cluster[2,1,2048]. Every measurement is a process of its own with a fresh session, of the same kinds
for ours and the peer (``fit_session.py``), which predicts for all rows several times: the first
call is timed from the DataFrame to the last row, later ones in rows per second. Where
``create_session`` starts it, the first call counts from the start of the session. The bare loop is
two processes that read half of the files each with pyarrow, without Spark; its first call is not
compared. All compute in float32 with one torch thread, give ten numbers per row, and write none of
them. The ratios are shown together with where the processor time of a later call goes.
"""

import io
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fit_session
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

FILES, WORKERS, CALLS = 8, 2, 4
CONF = {
    "spark.executor.memory": "2048m",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}
OURS = "sparkdl"
PEER, BARE = "predict_batch_udf", "bare loop"
AGAINST_PEER, AGAINST_BARE, FIRST_CALL = 1.3, 0.85, 1.0
Measured = dict[str, Any]
"""``calls``: the seconds of each; ``processor``: processor seconds of each by kind of process;
``session``: the seconds that it took to start."""
Runs = dict[str, list[Measured]]


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    options.add_argument("--case", choices=CASES, action="append", help="by default all")
    options.add_argument("--part", type=float, default=1.0, help="of the rows, for development")
    fit_session.add_option(options, default="plain and created")
    chosen = harness.parse(options, repeats=3, child=measure)
    kinds = chosen.session or ["plain", "created"]
    claims: list[harness.Claim] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in chosen.case or CASES:
            folder = Path(directory) / name
            rows = int(CASES[name].rows * chosen.part * (0.1 if chosen.quick else 1.0))
            write(folder, CASES[name], rows)
            turns = {
                f"{way}, {kind}": partial(in_a_process, way, kind, name, folder)
                for kind in kinds
                for way in WAYS
                if kind == kinds[0] or way in (OURS, PEER)
            }
            runs: Runs = harness.interleave(turns, repeats=chosen.repeats)
            found[name] = {"rows": rows, "seconds": runs}
            claims += compared(name, rows, runs, kinds)
    harness.report("inference", claims, {"runs": found})


def compared(name: str, rows: int, runs: Runs, kinds: Sequence[str]) -> list[harness.Claim]:
    """Shows the medians and returns the claims about them."""
    first = {
        way: harness.show(f"{name}, {way}, first call", [run["calls"][0] for run in each])
        for way, each in runs.items()
    }
    speed = {
        way: harness.show(
            f"{name}, {way}",
            [rows / statistics.median(run["calls"][1:]) for run in each],
            unit="rows/s",
            digits=0,
        )
        for way, each in runs.items()
    }
    for way, each in runs.items():
        later = [call for run in each for call in run["processor"][1:]]
        for kind in later[0]:
            harness.show(
                f"{name}, {way}, processor time of a call, {kind}",
                [call[kind] for call in later],
                digits=2,
            )
    kind = kinds[0]
    return [
        *(
            harness.claim(
                f"{name}: rows/s / {other}",
                speed[f"{OURS}, {kind}"],
                speed[f"{other}, {kind}"],
                target=target,
                at_least=True,
            )
            for other, target in ((PEER, AGAINST_PEER), (BARE, AGAINST_BARE))
        ),
        *(
            harness.claim(
                f"{name}: first call / {PEER}, {kind}",
                first[f"{OURS}, {kind}"],
                first[f"{PEER}, {kind}"],
                target=FIRST_CALL,
            )
            for kind in kinds
        ),
    ]


def write(folder: Path, case: Case, rows: int) -> None:
    """Writes the rows of a case in files of equal size."""
    folder.mkdir()
    draws = np.random.default_rng(7)
    for number in range(FILES):
        count = rows * (number + 1) // FILES - rows * number // FILES
        column: pa.Array
        if case.image:
            column = pa.array([_image(draws, case.shape) for _ in range(count)], pa.binary())
        else:
            values = case.draw(draws, count)
            column = pa.ListArray.from_arrays(
                np.arange(0, values.size + 1, values.shape[1], dtype=np.int32), values.reshape(-1)
            )
        pq.write_table(pa.table({"x": column}), folder / f"{number}.parquet", use_dictionary=False)


def _image(draws: np.random.Generator, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    pixels = draws.integers(0, 255, (shape[1], shape[2], shape[0]), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def in_a_process(way: str, kind: str, name: str, folder: Path) -> Measured:
    """Returns what each call in a fresh session took."""
    environment = harness.child_environment() | {"OMP_NUM_THREADS": "1"}
    child = harness.call_child(__file__, way, kind, name, str(folder), environment=environment)
    if kind != "plain":
        child["calls"][0] += child.get("session", 0.0)
    print(f"  {name}, {way}, {kind}: {child['calls']}", flush=True)
    return child


def measure(way: str, kind: str, name: str, folder: str) -> Measured:
    """Measures one contender."""
    return WAYS[way](CASES[name], Path(folder), kind)


def calls_of(call: Callable[[], object]) -> Measured:
    """Returns what several calls took."""
    calls, processor = [], []
    for _ in range(CALLS):
        before, began = harness.processor_spent(), time.perf_counter()
        call()
        calls.append(round(time.perf_counter() - began, 4))
        processor.append(harness.processor_since(before))
    return {"calls": calls, "processor": processor}


def to_the_last_row(frame_of: Callable[[], DataFrame]) -> Callable[[], object]:
    """Returns a function that makes a DataFrame and computes its rows."""
    return lambda: frame_of().write.format("noop").mode("overwrite").save()


def session(kind: str) -> tuple[SparkSession, float]:
    """Returns a session whose executors are there, and the seconds that it took."""
    began = time.perf_counter()
    spark = fit_session.start_session(kind, CONF)
    spark.range(2).repartition(2).count()  # waits for the executors
    return spark, time.perf_counter() - began


def ours(case: Case, folder: Path, kind: str) -> Measured:
    """Predicts with ``TorchModel.transform``."""
    from sparkdl import TorchModel

    spark, seconds = session(kind)
    model = TorchModel.from_module(
        case.build(),
        case.example(),
        featuresCol="x",
        imageCols=["x"] if case.image else [],
        predictionDtype="float32",
    )

    rows = partial(spark.read.parquet, str(folder))
    predicted = to_the_last_row(lambda: model.transform(rows()).select("prediction"))
    return calls_of(predicted) | {"session": seconds}


def peer(case: Case, folder: Path, kind: str) -> Measured:
    """Predicts with pyspark's ``predict_batch_udf``."""
    spark, seconds = session(kind)
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
    predicted = to_the_last_row(lambda: spark.read.parquet(str(folder)).select(predict("x")))
    return calls_of(predicted) | {"session": seconds}


def bare(case: Case, folder: Path, kind: str) -> Measured:
    """Predicts in two processes without Spark; times reading and predicting, not the start."""
    context = multiprocessing.get_context("spawn")
    files = sorted(folder.glob("*.parquet"))
    start = context.Barrier(WORKERS + 1)
    processes = [
        context.Process(target=_bare_worker, args=(case.name, files[rank::WORKERS], start))
        for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    start.wait(harness.CHILD_TIMEOUT_SECONDS)  # until the processes have what they need

    def turn() -> None:
        start.wait(harness.CHILD_TIMEOUT_SECONDS)
        start.wait(harness.CHILD_TIMEOUT_SECONDS)

    measured = calls_of(turn)
    for process in processes:
        process.join(harness.CHILD_TIMEOUT_SECONDS)
    return measured


def _bare_worker(name: str, files: list[Path], turn: Any) -> None:
    case = CASES[name]
    torch.set_num_threads(1)
    module = case.build().eval()
    turn.wait(harness.CHILD_TIMEOUT_SECONDS)
    for _ in range(CALLS):
        turn.wait(harness.CHILD_TIMEOUT_SECONDS)
        with torch.inference_mode():
            for batch in _batches(files):
                module(case.tensor(_numpy_of(batch, case))).numpy()
        turn.wait(harness.CHILD_TIMEOUT_SECONDS)


def _batches(files: list[Path]) -> Iterator[pa.Array]:
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(1024):
            yield batch.column(0)


def _numpy_of(column: pa.Array, case: Case) -> np.ndarray:
    if case.image:
        return np.array(column.to_pylist(), dtype=object)
    return column.flatten().to_numpy().reshape(len(column), *case.shape)


WAYS: Mapping[str, Callable[[Case, Path, str], Measured]] = {
    OURS: ours,
    PEER: peer,
    BARE: bare,
}

if __name__ == "__main__":
    main()
