"""What a Spark task does: it computes the chunks that are not done, or of an input that changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.process.torch_settings import share_freed_memory
from sparkdl.volumes.chunk import Read, Recipe, predict_chunk, read_chunk
from sparkdl.volumes.grid import Bounds, Sizes, chunks_of
from sparkdl.volumes.network import PatchModel
from sparkdl.volumes.records import Marker, Records
from sparkdl.volumes.store import Volume


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
        """Called by Spark; yields a row for each chunk that it has computed.

        Raises:
            DataError: an array cannot be read or written, or holds a number that cannot be
                converted.
            ModelError: the network fails.
        """
        share_freed_memory()  # before tensorstore starts its threads
        axes = len(self.chunk)
        source, target = Volume.opened(self.source, axes), Volume.opened(self.target, axes)
        records, chunks = Records(self.target), chunks_of(source.shape, self.chunk)
        model, patches = self.model, self.recipe.patches
        with model.predictor.running() as run:
            network = partial(model.outputs, run, kept=patches.kept)
            for place in (place for batch in batches for place in batch.column(0).to_pylist()):
                number = self.numbers[place]
                bounds, known = chunks[number], self.known.get(number)
                if known is not None:
                    read, digest = _reading(source, model.taken)
                    read_chunk(patches, bounds, read)
                    if digest.hexdigest() == known.read:
                        self.done.add(1)
                        continue
                    records.unmark(number)  # before its blocks are of both inputs
                read, digest = _reading(source, model.taken)
                write = target.write
                count = predict_chunk(self.recipe, bounds, read, write, network, run.device)
                records.mark(number, Marker(count, digest.hexdigest()), self.digest)
                self.done.add(1)
                yield pa.RecordBatch.from_pydict({"chunk": [number], "patches": [count]})


def _reading(source: Volume, dtype: torch.dtype) -> tuple[Read, Any]:
    """Reads of an input for one chunk, and the digest of all that they have read."""
    digest = hashlib.blake2b(digest_size=16)

    def read(bounds: Bounds) -> np.ndarray:
        values = source.read(bounds, dtype)
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return values

    return read, digest
