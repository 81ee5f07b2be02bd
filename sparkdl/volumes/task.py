"""What a Spark task does: it computes the chunks that are not done, or of an input that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from sparkdl.process.torch_settings import share_freed_memory
from sparkdl.volumes.chunk import Reading, Recipe, predict_chunk, read_chunk
from sparkdl.volumes.grid import Chunks, Sizes
from sparkdl.volumes.network import PatchModel
from sparkdl.volumes.records import Marker, Records
from sparkdl.volumes.store import Volume

SCHEMA = pa.schema([("chunk", pa.int64()), ("patches", pa.int64()), ("computed", pa.bool_())])


@dataclass(frozen=True)
class ChunkTask:
    """Computes chunks in a Spark task; sent to the executors.

    Attributes:
        model: which predicts the patches.
        recipe: how chunks are predicted.
        chunk: the size of a chunk.
        source: what to open and read.
        target: what to open and write.
        digest: of the job, for the markers.
        numbers: of the chunks to compute.
        known: the markers of those among them that are done, if their input is still the same.
        done: Spark's accumulator, which counts them.
    """

    model: PatchModel
    recipe: Recipe
    chunk: Sizes
    source: dict[str, Any]
    target: dict[str, Any]
    digest: str
    numbers: Sequence[int]
    known: Mapping[int, Marker]
    done: Any

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Called by Spark; yields a row for each chunk.

        Raises:
            DataError: an array cannot be read or written, or holds a number that cannot be
                converted.
            ModelError: the network fails.
        """
        share_freed_memory()  # before tensorstore starts its threads
        axes = len(self.chunk)
        source, target = Volume.opened(self.source, axes), Volume.opened(self.target, axes)
        records, chunks = Records(self.target), Chunks(source.shape, self.chunk)
        model, patches = self.model, self.recipe.patches
        with model.predictor.running() as run:
            network = partial(model.outputs, run, kept=patches.kept)
            for batch in batches:
                for place in batch.column(0).to_pylist():
                    number, reading = self.numbers[place], Reading(source, source.url, model.taken)
                    bounds, known = chunks[number], self.known.get(number)
                    if known is not None:
                        read_chunk(patches, bounds, reading)
                        if reading.digest == known.read:
                            yield self._row(number, known.patches, computed=False)
                            continue
                        records.unmark(number)  # before its blocks are of both inputs
                        reading = Reading(source, source.url, model.taken)
                    count = predict_chunk(self.recipe, bounds, reading, target, network, run.device)
                    records.mark(number, Marker(count, reading.digest), self.digest)
                    yield self._row(number, count, computed=True)

    def _row(self, number: int, patches: int, *, computed: bool) -> pa.RecordBatch:
        self.done.add(1)
        columns = [pa.array([number]), pa.array([patches]), pa.array([computed])]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
