"""What a worker sends of its replica's state, and what a reply does to that state.

The worker's end of a wire format, chunk by chunk. Nothing here sends or receives.

Keeps non-finite values from leaving a worker, and from entering a sum if a worker missed them.

A single NaN would make the center NaN for everyone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkdl.averager.values.wire_format import AsDtype, Packing, WireFormat, plan_fragments
from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout, Segment, SpreadValues

ADVICE = (
    "Lower the learning rate, clip gradients (clipNorm) if the strategy can, or look for bad "
    "values in the features"
)

WHOLE = 1 << 20
"""Tensors of at most this many values are checked completely, in a tenth of a millisecond."""
PLACES = 1 << 16
"""Number of elements at which larger ones are checked."""


def count_non_finite(values: Tensor) -> int:
    """How many values are NaN or infinite.

    Args:
        values: of any shape and dtype, on any device.
    """
    if values.is_complex():
        return int((~torch.isfinite(values)).sum())
    # A sum is finite only if every value is (it may also overflow, hence the second check); it
    # costs little while the values are in the cache, on their way from or to a socket.
    if not values.is_floating_point() or math.isfinite(_some_sum(values)):
        return 0
    return int((~torch.isfinite(values)).sum())


def _some_sum(values: Tensor) -> float:
    if values.dtype in (torch.float32, torch.float64) and values.is_cpu and values.dim() == 1:
        # numpy works in this thread; torch would wake its pool for every chunk.
        numbers = values.detach().numpy()
        with np.errstate(over="ignore"):
            return float(np.dot(numbers, numbers))
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return values.sum(dtype=wide).item()


def looks_finite(values: Tensor) -> bool:
    """Whether a quick check finds no NaN or infinity; in large tensors it samples 65,536 elements.

    A non-finite gradient affects more than a few elements of a model.

    Args:
        values: shape (elements,), on any device.
    """
    step = len(values) // PLACES if len(values) > WHOLE else 1
    return not count_non_finite(values[::step])


def require_finite(values: Tensor, window: WindowReport) -> None:
    """Check what a worker is about to contribute.

    Args:
        values: a part of the worker's state.
        window: what it was trained on.

    Raises:
        NonFiniteError: there are NaN or infinite values.
    """
    bad = count_non_finite(values)
    if bad:
        who = f"rank {window.rank}"
        if (window.group_weight or 0) > max(1, window.divisor):
            who += ", which reports for all workers averaged with it,"
        raise NonFiniteError(
            f"{who} has {bad} NaN or infinite values among its parameters, "
            f"buffers or optimizer state after epoch {window.epoch}, step {window.step} "
            f"(mean loss of the window: {window.loss_sum / (window.divisor or 1):.6g}). {ADVICE}",
            rank=window.rank,
            epoch=window.epoch,
            step=window.step,
        )


@dataclass(frozen=True, slots=True)
class ReplicaChunk:
    """One message's worth of a replica's state.

    Attributes:
        segment: the segment that it is a part of.
        values: shape (elements,), a view of the replica's state.
        base: same shape, in the center's dtype: the center received last, if the values travel as
            changes from it; else None.
        wire_format: how the values travel.
        spread: the segment, if every worker has a part of it; ``values`` is then a copy.
        start: where the chunk begins in it.
    """

    segment: Segment
    values: Tensor
    base: Tensor | None
    wire_format: WireFormat
    spread: SpreadValues | None = None
    start: int = 0

    @property
    def center_packing(self) -> Packing:
        """The packing in which the center itself arrives."""
        return AsDtype(self.segment.center_dtype)

    @property
    def reply_packing(self) -> Packing:
        """The packing in which the reply to a round arrives."""
        return self.wire_format.reply(self.segment)

    def contribution(self, window: WindowReport) -> Tensor:
        """What to send; may be the state itself. Spread chunks are asked in order, each once.

        Raises:
            NonFiniteError: there are NaN or infinite values.
        """
        if self.spread is not None:
            self.spread.read_on(self.values)
        if self.segment.averaged:
            require_finite(self.values, window)
        encoded = self.wire_format.encode(self.values, self.base, self.segment)
        return self.wire_format.contribution(self.segment).pack(encoded)

    def room_for_reply(self) -> Tensor:
        """Separate memory in which to receive the reply to a round, still packed."""
        packing = self.reply_packing
        return torch.empty(packing.numel(len(self.values)), dtype=packing.dtype)

    def take_center(self, center: Tensor) -> None:
        """Overwrite values and base with the center, which may be ``values``, received in place."""
        if center is not self.values:
            self.values.copy_(center)
        if self.base is not None:
            self.base.copy_(center)
        if self.spread is not None:
            self.spread.write(self.start, self.values)

    def take_reply(self, reply: Tensor) -> None:
        """Overwrite values and base with a round's result, unpacked or ``values`` itself."""
        if reply is not self.values:
            self.wire_format.decode(reply, self.values, self.base, self.segment)

    def center_after(self, packed: Tensor) -> Tensor:
        """A round's result, in separate memory; updates the base, but not the values."""
        center = torch.empty_like(self.values)
        reply = self.reply_packing.unpack(packed, len(self.values))
        self.wire_format.decode(reply, center, self.base, self.segment)
        return center


class ReplicaCodec:
    """Cuts a replica's state into chunks, and keeps the center that their changes refer to.

    Args:
        wire_format: how values travel.
        fragments: how many parts of the state the rounds exchange in turn.

    Attributes:
        chunk_bytes: size of the largest message, as told by the averager; 0 before that.
        fragments: as given.
    """

    def __init__(self, wire_format: WireFormat, fragments: int) -> None:
        self.chunk_bytes = 0
        self.fragments = fragments
        self._wire_format = wire_format
        # The kinds of the replica's segments; the optimizer's come after the model's.
        self._kinds: list[str] = []
        self._base: list[Tensor | None] = []
        self._scratch = self._copies = torch.empty(0, dtype=torch.uint8)

    def begin(self, layout: Layout, chunk_bytes: int) -> None:
        """Learn what the replica's state consists of, except for its optimizer's.

        Args:
            layout: kinds and sizes of parameters and buffers.
            chunk_bytes: size of the largest message.
        """
        self._kinds = [segment.kind for segment in layout]
        self.chunk_bytes = chunk_bytes
        self._scratch = torch.empty(chunk_bytes, dtype=torch.uint8)
        self._copies = torch.empty(chunk_bytes, dtype=torch.uint8)

    def whole(self, segments: Sequence[Tensor | SpreadValues]) -> list[ReplicaChunk]:
        """All chunks of a replica's flat state, as views."""
        return self._cut(segments, 1, 0)

    def fragment(self, segments: Sequence[Tensor], index: int) -> list[ReplicaChunk]:
        """The chunks of one fragment of a replica's flat state, as views."""
        return self._cut(segments, self.fragments, index)

    def room(self, chunk: ReplicaChunk, packing: Packing) -> Tensor:
        """Where to receive a chunk's new values: in place if possible, else in separate memory.

        The separate memory is overwritten by the next chunk.
        """
        values = chunk.values
        in_place = packing == AsDtype(values.dtype) and values.device.type == "cpu"
        if in_place and chunk.base is None:
            return values
        size = packing.numel(len(values)) * packing.dtype.itemsize
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(packing.dtype)

    def _cut(
        self, segments: Sequence[Tensor | SpreadValues], fragments: int, index: int
    ) -> list[ReplicaChunk]:
        state = list(segments)
        layout = self._layout_of(state)
        self._extend_base(state, layout)
        chunks = []
        for chunk in plan_fragments(layout, self.chunk_bytes, fragments)[index]:
            segment, base = layout[chunk.segment], self._base[chunk.segment]
            stretch = None if base is None else base[chunk.start : chunk.stop]
            whole, spread = state[chunk.segment], None
            if isinstance(whole, Tensor):
                values = whole[chunk.start : chunk.stop]
            else:
                size = (chunk.stop - chunk.start) * segment.dtype.itemsize
                values, spread = self._copies[:size].view(segment.dtype), whole
            parts = segment, values, stretch, self._wire_format, spread, chunk.start
            chunks.append(ReplicaChunk(*parts))
        return chunks

    def _layout_of(self, state: Sequence[Tensor | SpreadValues]) -> Layout:
        more = len(state) - len(self._kinds)
        return tuple(
            Segment(kind, tensor.dtype, tensor.numel())
            for kind, tensor in zip(self._kinds + ["optimizer"] * more, state, strict=True)
        )

    def _extend_base(self, state: Sequence[Tensor | SpreadValues], layout: Layout) -> None:
        """Start the base at zero, as the averager does, for state that was not there yet."""
        for values, segment in list(zip(state, layout, strict=True))[len(self._base) :]:
            base = None
            if isinstance(values, Tensor) and self._wire_format.sends_changes(segment):
                base = torch.zeros_like(values, dtype=segment.center_dtype)
            self._base.append(base)
