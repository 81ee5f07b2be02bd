"""The driver's copy of the parameters, the sum that becomes the next, and what of it is sent.

No sockets: values arrive in tensors, and leave as buffers in the form in which they travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.averager.accumulator import Accumulator
from sparkdl.averager.codec import Codec
from sparkdl.averager.wire import Chunk, chunk_bytes, plan_chunks
from sparkdl.protocols import Layout
from sparkdl.transport.framing import octets_of, values_prefix

Frames = list[memoryview]
"""Messages of values: prefixes and what they announce, in turn."""


class Center:
    """The center and one sum: memory for twice the parameters, whatever the number of workers.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers, which decides how values are cut.
        codec: how values travel and how the mean becomes the center.

    Attributes:
        layout: as given.
        values: the center, a tensor of ``center_dtype`` a segment.
        chunk_bytes: size of the largest message of values.
        chunks: how the segments are cut.
        sum: what is being added; None between two rounds.
    """

    def __init__(
        self, layout: Layout, center: Sequence[Tensor], world_size: int, codec: Codec
    ) -> None:
        self.layout = layout
        self.values = list(center)
        self.chunk_bytes = chunk_bytes(world_size)
        self.chunks = plan_chunks(layout, self.chunk_bytes)
        self.sum: Accumulator | None = None
        self._codec = codec
        self._wire_dtypes = [codec.wire_dtype(segment) for segment in layout]
        self._spare = [torch.empty_like(segment) for segment in center]
        self._copy: list[Tensor] = []
        # The outcome of the last round as it travels, where that is not the center itself.
        self._reply: list[Tensor] = []
        self._frames: dict[frozenset[str] | None, Frames] = {}

    def wire_dtype(self, chunk: Chunk) -> torch.dtype:
        """Element type in which a chunk is contributed."""
        return self._wire_dtypes[chunk.segment]

    def open_sum(self, ranks: Sequence[int]) -> Accumulator:
        """Begin a sum, in the order of ``ranks``; one that was not committed is forgotten."""
        self.sum = Accumulator(self.layout, self._wire_dtypes, self.chunks, self._spare, ranks)
        return self.sum

    def commit(self, *, weighted: bool) -> None:
        """Make the sum the new center.

        Args:
            weighted: whether anyone has contributed; if not, the center stays as it is.
        """
        assert self.sum is not None
        if weighted:
            self.sum.finish()
            old = self.values
            self.values, reply = self._codec.commit(self.values, self._spare)
            self._spare = old if self.values is self._spare else self._spare
        else:
            reply = self._codec.unchanged(self.values, self._spare)
        self.sum = None
        self._frames = {}
        self._set_reply(reply)

    def reply(self) -> Frames:
        """The outcome of the last round, as the codec has it."""
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

    def copy(self) -> list[Tensor]:
        """The center as it is now, in the same place each time; the next rounds overwrite it."""
        if not self._copy:
            self._copy = [torch.empty_like(segment) for segment in self.values]
        for copy, segment in zip(self._copy, self.values, strict=True):
            copy.copy_(segment)
        return self._copy

    def _set_reply(self, reply: Sequence[Tensor]) -> None:
        if not self._reply:
            self._reply = [
                torch.empty(0, dtype=dtype)
                if values.dtype is dtype
                else torch.empty_like(values, dtype=dtype)
                for values, dtype in zip(reply, self._wire_dtypes, strict=True)
            ]
        for index, (values, dtype) in enumerate(zip(reply, self._wire_dtypes, strict=True)):
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
