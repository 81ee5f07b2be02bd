"""Predict a volume by one Spark job; everything that can be checked is checked before it starts."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql import SparkSession
from torch import nn
from tqdm.auto import tqdm

from sparkdl.errors import ConfigError, DataError
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.cluster.slots import most_slots
from sparkdl.spark.inference.failures import told_in_driver
from sparkdl.spark.launch.environments import checked
from sparkdl.user_code.tracebacks import message_of
from sparkdl.volumes.chunk import Recipe, mirrored
from sparkdl.volumes.grid import (
    Chunks,
    Patches,
    Sizes,
    chosen_chunk,
    chunk_bytes,
    default_blocks,
    require_chunk,
)
from sparkdl.volumes.network import PatchModel, identity_of
from sparkdl.volumes.numbers import Reading
from sparkdl.volumes.options import VolumeOptions
from sparkdl.volumes.places import Place
from sparkdl.volumes.records import Marker, Records, alone, digest_of
from sparkdl.volumes.store import Volume, created, require_apart
from sparkdl.volumes.task import ChunkTask

logger = logging.getLogger(__name__)

WORKER_BYTES = 1 << 30
"""What a task takes in memory besides the network, where Spark's settings do not limit it."""
PROCESS_BYTES = 400 << 20
"""What a process takes before its first chunk: Python, torch, pyspark and tensorstore."""
VOXELS_AT_ONCE = 1 << 18
"""Patches go through the network together as long as they have no more voxels."""
MOST_TASKS = 50_000
"""If there are more chunks, a task computes several."""
MOST_SLOTS = 1000
"""More are not counted on, where executors come on demand."""
COLUMNS = "chunk bigint, patches bigint, computed boolean"
"""Of the Spark job's rows."""
LOOK_S = 0.2
"""Seconds between two looks at how many chunks are done."""


@dataclass(frozen=True)
class VolumeSummary:
    """What came of ``TorchModel.transform_volume``.

    Attributes:
        chunks: of the output, all of which are done.
        computed: those that this call computed; the others were done before.
        skipped: those that hold only zeros in the input, and so in the output.
        patches: that went through the network in this call.
        chunk: the size of a chunk, without channels.
        voxels: of the chunks that this call computed, without channels.
        seconds: that the Spark job took.
    """

    chunks: int
    computed: int
    skipped: int
    patches: int
    chunk: tuple[int, ...]
    voxels: int
    seconds: float

    @property
    def voxels_per_second(self) -> float:
        """Voxels per second; 0 if there was nothing left to compute."""
        return self.voxels / self.seconds if self.voxels else 0.0


def transform_volume(
    spark: SparkSession,
    module: nn.Module,
    model: PatchModel,
    source: Place,
    target: Place,
    options: VolumeOptions,
    *,
    progress: bool,
) -> VolumeSummary:
    """See ``TorchModel.transform_volume``.

    Args:
        spark: the session.
        module: what predicts the patches, as it is in the driver.
        model: the same, as it is sent to the executors.
        source: the input.
        target: the output.
        options: how.
        progress: whether to show a bar.
    """
    read = Volume.opened(source, len(options.patch), open=True, read=True)
    model.require_input(read)
    model = model.at_once(VOXELS_AT_ONCE // math.prod(options.patch))
    middle = [max(0, (n - p) // 2) for n, p in zip(read.shape, options.patch, strict=True)]
    wanted = tuple((low, low + p) for low, p in zip(middle, options.patch, strict=True))
    sample = mirrored(Reading(read, read.url, model.taken), read.shape, wanted)
    outputs, cut, network_bytes = model.try_patch(module, sample)
    crop = options.crop or cut
    if any(asked < least for asked, least in zip(crop, cut, strict=True)):
        raise ConfigError(
            f"crop={crop}, but the model's output is {cut} smaller on each side already. Choose at "
            "least that, or leave it out"
        )
    patches = Patches(read.shape, options.patch, options.overlap, crop)
    if options.labels and outputs < 2:
        raise ConfigError(
            "reduce='argmax' writes which channel is the largest, but the model returns only one. "
            "Leave it out, and compare the output with a threshold"
        )
    batch = model.predictor.prediction.batch_rows
    records = Records(target)
    job = records.claim(
        {
            "model": identity_of(module),
            "output": model.key,
            "precision": str(model.predictor.prediction.dtype),
            "patches at once": batch,
            "input": read.identity,
            "patch": list(options.patch),
            "overlap": list(options.overlap),
            "crop": list(crop),
            "reduce": "argmax" if options.labels else None,
            "skip": "zeros" if options.skip_zeros else None,
            "chunk": options.chunk and list(options.chunk),
        }
    )
    known = job["chunk"] and tuple(job["chunk"])
    blocks = default_blocks(read.shape, patches.stride, known)
    making = partial(created, target, read, outputs, labels=options.labels, blocks=blocks)
    trial = making(trial=True)
    require_apart(read, trial)
    chunk = known or _chosen(spark, patches, trial.blocks, read, outputs, network_bytes)
    require_chunk(chunk, trial.blocks, patches)
    with alone(target, spark.sparkContext.applicationId) as lease:
        job = records.claim({**job, "chunk": list(chunk)})
        records.note(job)
        write, done, files = making(), records.done(job), read.files
        if any(each.patches for each in done.values()) and write.holds_nothing:
            records.forget()  # its blocks have been deleted
            done = {}
        same = records.has_seen(files)
        if not done:
            records.saw(files)
        task = ChunkTask(
            model,
            Recipe(patches, write.blocks, outputs, batch, options.labels, options.skip_zeros),
            chunk,
            read.specification,
            write.specification,
            digest_of(job),
            (),
            {} if same else done,
            spark.sparkContext.accumulator(0),
        )
        summary = _computed(spark, task, done, progress)
        lease.check()
        if read.files != files:
            raise DataError(
                f"the input, {read.url}, was written to while it was predicted, so that the output "
                "may be of both. Call this again once nobody writes to it: what has changed is "
                "computed again"
            )
        records.saw(files)
        return summary


def _chosen(
    spark: SparkSession,
    patches: Patches,
    blocks: Sizes,
    read: Volume,
    outputs: int,
    network_bytes: int,
) -> Sizes:
    """The chunk that a task's memory allows."""
    read_bytes = (read.channels or 1) * read.dtype.itemsize

    def memory(chunk: Sizes) -> int:
        return chunk_bytes(
            patches,
            blocks,
            chunk,
            read_bytes=read_bytes,
            read_blocks=read.read_blocks,
            outputs=outputs,
        )

    slots = min(most_slots(spark), MOST_SLOTS)
    limit = worker_bytes(spark)
    total = WORKER_BYTES + network_bytes if limit is None else limit
    left = total - PROCESS_BYTES - network_bytes
    return chosen_chunk(patches, blocks, slots, left, memory, must_fit=limit is not None)


def worker_bytes(spark: SparkSession) -> int | None:
    """What a task may take in memory, in bytes, Python and torch included; None if nobody says.

    Args:
        spark: whose settings say so; Spark itself divides the limit in the same way.
    """
    conf = spark.sparkContext.getConf()
    text = conf.get("spark.executor.pyspark.memory") or conf.get("spark.executor.memoryOverhead")
    found = re.match(r"\s*(\d+)\s*([kmgtp]?)", (text or "").lower())
    if found is None:
        return None
    tasks = int(conf.get("spark.executor.cores") or 1) // int(conf.get("spark.task.cpus") or 1)
    return (int(found[1]) << 10 * ("kmgtp".index(found[2] or "m") + 1)) // max(1, tasks)


def _computed(
    spark: SparkSession, task: ChunkTask, done: dict[int, Marker], progress: bool
) -> VolumeSummary:
    """Compute what is missing, or was read from an input that has changed, by a Spark job.

    Args:
        spark: the session.
        task: with any numbers.
        done: what is noted of each chunk that is done, by number.
        progress: whether to show a bar.

    Raises:
        DataError: an array cannot be read or written.
        ModelError: the network fails.
    """
    chunks = Chunks(task.recipe.patches.shape, task.chunk)
    numbers = [n for n in range(len(chunks)) if n not in done or n in task.known]
    logger.info(
        "of %d chunks of %s, %d are missing, and the input of %d others is compared",
        *(len(chunks), task.chunk, len(chunks) - len(done), len(task.known)),
    )
    began, found = time.perf_counter(), dict[int, int]()
    if numbers:
        found = _run(spark, replace(task, numbers=numbers), len(chunks) - len(numbers), progress)
    before = {number: marker.patches for number, marker in done.items()}
    return VolumeSummary(
        chunks=len(chunks),
        computed=len(found),
        skipped=sum(not patches for patches in {**before, **found}.values()),
        patches=sum(found.values()),
        chunk=task.chunk,
        voxels=sum(math.prod(upper - lower for lower, upper in chunks[n]) for n in found),
        seconds=time.perf_counter() - began,
    )


def _run(spark: SparkSession, task: ChunkTask, before: int, progress: bool) -> dict[int, int]:
    """The patches of each chunk that a Spark job has computed, by number."""
    count = len(task.numbers)
    rows = spark.range(0, count, 1, min(count, MOST_TASKS))
    results: list[Any] = []
    failures: list[Exception] = []

    def body() -> None:
        results.extend(rows.mapInArrow(checked(task), COLUMNS).collect())

    jobs = RunJobs(spark.sparkContext, f"predicts {count} chunks of a volume")
    with _bar(before, before + count, progress) as show:
        try:
            jobs.start(body, failures.append)
            while not jobs.wait(LOOK_S):
                show(before + task.done.value)
        finally:
            jobs.end()
        for failure in failures:
            with told_in_driver():
                raise failure
        show(before + count)
    return {row.chunk: row.patches for row in results if row.computed}


@contextlib.contextmanager
def _bar(done: int, chunks: int, visible: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar in chunks; one that cannot be shown is left out with a warning."""
    bar = tqdm(disable=True)

    def show(number: int) -> None:
        try:
            if number > bar.n:
                bar.update(number - bar.n)
        except Exception as error:  # a stream, a terminal or a widget may fail in any way
            bar.disable = True
            logger.warning("the progress bar is left out: %s", message_of(error))

    with contextlib.suppress(Exception):  # as above
        bar = tqdm(
            desc="predicting", total=chunks, initial=done, unit=" chunks", disable=not visible
        )
    try:
        yield show
    finally:
        with contextlib.suppress(Exception):  # as above
            bar.close()
