"""Predict a volume by one Spark job; everything that can be checked is checked before it starts."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql import SparkSession
from torch import nn
from tqdm.auto import tqdm

from sparkdl.arguments import as_list, require_whole
from sparkdl.errors import ConfigError, DataError
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.cluster.slots import most_slots
from sparkdl.spark.inference.failures import told_in_driver
from sparkdl.spark.launch.environments import checked
from sparkdl.user_code.tracebacks import message_of
from sparkdl.volumes.chunk import Recipe, mirrored
from sparkdl.volumes.grid import (
    Patches,
    Sizes,
    chunks_of,
    default_blocks,
    default_chunk,
    require_chunk,
)
from sparkdl.volumes.network import PatchModel, identity_of
from sparkdl.volumes.records import Marker, Records, alone, digest_of
from sparkdl.volumes.store import Place, Volume, created, require_apart
from sparkdl.volumes.task import ChunkTask

logger = logging.getLogger(__name__)

VOXELS_AT_ONCE = 1 << 18
"""Patches go through the network together as long as they have no more voxels."""
MOST_TASKS = 50_000
"""If there are more chunks, a task computes several."""
MOST_SLOTS = 1000
"""More are not counted on, where executors come on demand."""
COLUMNS = "chunk bigint, patches bigint"
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
    *,
    patch: Sequence[int],
    overlap: Sequence[int],
    crop: Sequence[int] | None,
    chunk: str | Sequence[int],
    reduce: str | None,
    skip: str | None,
    progress: bool,
) -> VolumeSummary:
    """See ``TorchModel.transform_volume``; ``model`` is ``module`` as it is sent to executors."""
    axes = len(as_list(patch) or ())
    if axes not in (2, 3):
        raise ConfigError(
            f"patch must be two or three whole numbers, (y, x) or (z, y, x), got {patch!r}"
        )
    for name, given, known in (("reduce", reduce, "argmax"), ("skip", skip, "zeros")):
        if given not in (None, known):
            raise ConfigError(f"{name} must be {known!r} or None, got {given!r}")
    patch, overlap = _sizes("patch", patch, axes, 1), _sizes("overlap", overlap, axes, 0)
    chosen_crop = None if crop is None else _sizes("crop", crop, axes, 0)
    chosen = None if isinstance(chunk, str) and chunk == "auto" else _sizes("chunk", chunk, axes, 1)
    read = Volume.opened(source, axes, open=True, read=True)
    model.require_input(read)
    model = model.at_once(VOXELS_AT_ONCE // math.prod(patch))
    middle = [max(0, (n - p) // 2) for n, p in zip(read.shape, patch, strict=True)]
    wanted = tuple((low, low + p) for low, p in zip(middle, patch, strict=True))
    sample = mirrored(partial(read.read, dtype=model.taken), read.shape, wanted)
    outputs, cut = model.try_patch(module, sample)
    cropped = chosen_crop or cut
    if any(asked < least for asked, least in zip(cropped, cut, strict=True)):
        raise ConfigError(
            f"crop={cropped}, but the model's output is {cut} smaller on each side already. Choose "
            "at least that, or leave it out"
        )
    patches = Patches(read.shape, patch, overlap, cropped)
    if reduce and outputs < 2:
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
            "patch": list(patch),
            "overlap": list(overlap),
            "crop": list(cropped),
            "reduce": reduce,
            "skip": skip,
            "chunk": chosen and list(chosen),
        }
    )
    slots = min(most_slots(spark), MOST_SLOTS)
    size = tuple(job["chunk"] or default_chunk(patches, outputs, slots))
    blocks = default_blocks(read.shape, patch, size)
    making = partial(created, target, read, outputs, labels=bool(reduce), blocks=blocks)
    trial = making(trial=True)
    require_apart(read, trial)
    if not job["chunk"]:  # the target may have blocks of its own
        size = tuple(-(-n // b) * b for n, b in zip(size, trial.blocks, strict=True))
    require_chunk(size, trial.blocks, patches)
    with alone(target, spark.sparkContext.applicationId) as lease:
        job = records.claim({**job, "chunk": list(size)})
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
            Recipe(patches, write.blocks, outputs, batch, bool(reduce), bool(skip)),
            size,
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


def _sizes(name: str, given: Any, axes: int, least: int) -> Sizes:
    found = as_list(given)
    if found is None or len(found) != axes:
        other = "'auto' or " if name == "chunk" else ""
        raise ConfigError(
            f"{name} must be {other}{axes} whole numbers, one for each axis of patch, got {given!r}"
        )
    return tuple(require_whole(name, each, least) for each in found)


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
    chunks = chunks_of(task.recipe.patches.shape, task.chunk)
    numbers = [n for n in range(len(chunks)) if n not in done or n in task.known]
    logger.info(
        "of %d chunks of %s, %d are missing, and the input of %d others is compared",
        *(len(chunks), task.chunk, len(chunks) - len(done), len(task.known)),
    )
    began, results, failures = time.perf_counter(), list[Any](), list[Exception]()
    jobs = RunJobs(spark.sparkContext, f"predicts {len(numbers)} chunks of a volume")
    rows = spark.range(0, len(numbers), 1, max(1, min(len(numbers), MOST_TASKS)))

    def body() -> None:
        results.extend(rows.mapInArrow(checked(replace(task, numbers=numbers)), COLUMNS).collect())

    before = len(chunks) - len(numbers)
    with _bar(before, len(chunks), progress and bool(numbers)) as show:
        try:
            if numbers:
                jobs.start(body, failures.append)
            while not jobs.wait(LOOK_S):
                show(before + task.done.value)
        finally:
            jobs.end()
        for failure in failures:
            with told_in_driver():
                raise failure
        show(len(chunks))
    found = {row.chunk: row.patches for row in results}
    patches = {**{number: marker.patches for number, marker in done.items()}, **found}
    return VolumeSummary(
        chunks=len(chunks),
        computed=len(found),
        skipped=sum(not each for each in patches.values()),
        patches=sum(found.values()),
        chunk=task.chunk,
        voxels=sum(math.prod(upper - lower for lower, upper in chunks[n]) for n in found),
        seconds=time.perf_counter() - began,
    )


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
