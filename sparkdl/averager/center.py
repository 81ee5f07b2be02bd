"""The driver's copy of the parameters, the sum that becomes the next, and what of it is sent.

No sockets: values arrive in tensors, and leave as buffers in the form in which they travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.averager.accumulator import Accumulator
from sparkdl.averager.center_update import (
    CenterUpdate,
    Contributions,
    Memory,
    ReplaceByMean,
    new_memory,
)
from sparkdl.averager.wire import Chunk, chunk_bytes, plan_chunks
from sparkdl.averager.wire_format import WireFormat
from sparkdl.protocols import Layout
from sparkdl.transport.framing import octets_of, values_prefix

Frames = list[memoryview]
"""Messages of values: prefixes and what they announce, in turn."""


def named(layout: Layout, values: Sequence[Tensor], memory: Memory) -> dict[str, Tensor]:
    """A center and what its update remembers, each tensor with the name that it has in files."""
    names = [f"{index}.{segment.kind}" for index, segment in enumerate(layout)]
    return dict(zip(names, values, strict=True)) | {
        f"{name}.{key}": tensor
        for name, kept in zip(names, memory, strict=True)
        for key, tensor in kept.items()
    }


class Center:
    """The center and one sum: memory for twice the parameters, whatever the number of workers.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers, which decides how values are cut.
        wire_format: how values travel.
        update: what contributions do to the center.
        memory: what the update remembers; by default it begins. Owned from here on.

    Attributes:
        layout: as given.
        values: the center, a tensor of ``center_dtype`` a segment.
        memory: what the update remembers.
        chunk_bytes: size of the largest message of values.
        chunks: how the segments are cut.
        sum: what is being added; None between two rounds.
    """

    def __init__(
        self,
        layout: Layout,
        center: Sequence[Tensor],
        world_size: int,
        wire_format: WireFormat,
        update: CenterUpdate | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.layout = layout
        self.values = list(center)
        self._update = update or ReplaceByMean()
        self.memory = new_memory(self._update, layout) if memory is None else memory
        self.chunk_bytes = chunk_bytes(world_size)
        self.chunks = plan_chunks(layout, self.chunk_bytes)
        self.sum: Accumulator | None = None
        self._wire_format = wire_format
        self._wire_dtypes = [wire_format.wire_dtype(segment) for segment in layout]
        # Where the mean is what has changed, or the update says how; others become the mean.
        self._moves = [
            segment.averaged and (wire_format.sends_changes or self._update.updates(segment))
            for segment in layout
        ]
        self._spare = [torch.empty_like(segment) for segment in center]
        self._copy: dict[str, Tensor] = {}
        # The outcome of the last round as it travels, where that is not the center itself.
        self._reply: list[Tensor] = []
        self._frames: dict[frozenset[str] | None, Frames] = {}

    def wire_dtype(self, chunk: Chunk) -> torch.dtype:
        """Element type in which a chunk is contributed."""
        return self._wire_dtypes[chunk.segment]

    def scale(self, staleness: int) -> float:
        """By what a contribution is multiplied before the mean is formed.

        Args:
            staleness: how often the center was updated since its worker has received it.
        """
        return self._update.scale(staleness) if self._wire_format.sends_changes else 1.0

    def open_sum(self, ranks: Sequence[int]) -> Accumulator:
        """Begin a sum, in the order of ``ranks``; one that was not committed is forgotten."""
        self.sum = Accumulator(self.layout, self._wire_dtypes, self.chunks, self._spare, ranks)
        return self.sum

    def commit(self, contributions: Contributions) -> None:
        """Have the sum change the center; without contributions it stays as it is.

        Args:
            contributions: what the sum is of.
        """
        assert self.sum is not None
        if contributions.weights:
            self.sum.finish()
            for chunk in self.chunks:
                if self._moves[chunk.segment]:
                    self._move(chunk, contributions)
            for index, moves in enumerate(self._moves):
                if not moves:
                    self.values[index], self._spare[index] = self._spare[index], self.values[index]
        elif self._wire_format.replies_changes:
            for spare in self._spare:
                spare.zero_()
        self.sum = None
        self._frames = {}
        self._set_reply()

    def _move(self, chunk: Chunk, contributions: Contributions) -> None:
        """Add a change to the center while both are in the cache."""
        center, change = chunk.of(self.values), chunk.of(self._spare)
        if not self._wire_format.sends_changes:
            change.sub_(center)
        if self._update.updates(self.layout[chunk.segment]):
            kept = {
                name: tensor[chunk.start : chunk.stop]
                for name, tensor in self.memory[chunk.segment].items()
            }
            self._update.step(center, change, kept, contributions)
        if self._wire_format.replies_changes:
            change.copy_(change.to(self.wire_dtype(chunk)))  # as the workers will see it
        center.add_(change)

    def reply(self) -> Frames:
        """The outcome of the last round, as it travels."""
        if None not in self._frames:
            self._frames[None] = self._framed(self._reply, self.chunks)
        return self._frames[None]

    def state(self, *kinds: str) -> Frames:
        """The center's segments of some kinds, of ``center_dtype``; all of them without any."""
        key = frozenset(kinds)
        if key not in self._frames:
            of_kind = [
                chunk
                for chunk in self.chunks
                if not kinds or self.layout[chunk.segment].kind in kinds
            ]
            self._frames[key] = self._framed(self.values, of_kind)
        return self._frames[key]

    def model(self) -> list[Tensor]:
        """A copy of what is the model's, without the optimizer's state."""
        return [
            values.clone()
            for segment, values in zip(self.layout, self.values, strict=True)
            if segment.kind != "optimizer"
        ]

    def named(self) -> dict[str, Tensor]:
        """All that a checkpoint has to hold of it, by name."""
        return named(self.layout, self.values, self.memory)

    def copy(self) -> dict[str, Tensor]:
        """The same as it is now, in the same place each time; the next rounds overwrite it."""
        present = self.named()
        if not self._copy:
            self._copy = {name: torch.empty_like(tensor) for name, tensor in present.items()}
        for name, tensor in present.items():
            self._copy[name].copy_(tensor)
        return self._copy

    def _set_reply(self) -> None:
        """Have at hand what the workers are sent, in the form in which it travels."""
        outcome = [
            spare if self._wire_format.replies_changes and segment.averaged else values
            for segment, values, spare in zip(self.layout, self.values, self._spare, strict=True)
        ]
        if not self._reply:
            self._reply = [
                torch.empty(0, dtype=dtype)
                if values.dtype is dtype
                else torch.empty_like(values, dtype=dtype)
                for values, dtype in zip(outcome, self._wire_dtypes, strict=True)
            ]
        for index, (values, dtype) in enumerate(zip(outcome, self._wire_dtypes, strict=True)):
            if values.dtype is dtype:
                self._reply[index] = values
            else:
                self._reply[index].copy_(values)

    def _framed(self, segments: list[Tensor], chunks: Sequence[Chunk]) -> Frames:
        frames: Frames = []
        for chunk in chunks:
            octets = octets_of(chunk.of(segments))
            frames += [values_prefix(octets.nbytes), octets]
        return frames
