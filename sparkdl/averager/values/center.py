"""The driver's copy of the parameters, the sum that becomes the next one, and what is sent.

There are no sockets here: values arrive in tensors, and leave as buffers ready to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparkdl.averager.values.accumulator import Accumulator
from sparkdl.averager.values.center_update import (
    CenterUpdate,
    Contributions,
    Memory,
    ReplaceByMean,
    new_memory,
)
from sparkdl.averager.values.wire_format import (
    Chunk,
    Packing,
    WireFormat,
    chunk_bytes,
    plan_chunks,
    plan_fragments,
)
from sparkdl.errors import ConfigError
from sparkdl.protocols import Layout
from sparkdl.transport.channel import Frames
from sparkdl.transport.framing import octets_of, values_prefix


def named(layout: Layout, values: Sequence[Tensor], memory: Memory) -> dict[str, Tensor]:
    """A center and what its update remembers, with each tensor's name in files."""
    names = [f"{index}.{segment.kind}" for index, segment in enumerate(layout)]
    return dict(zip(names, values, strict=True)) | {
        f"{name}.{key}": tensor
        for name, kept in zip(names, memory, strict=True)
        for key, tensor in kept.items()
    }


@dataclass(frozen=True, kw_only=True)
class CenterSpec:
    """What is settled about a center before the run begins.

    Attributes:
        layout: kinds and sizes of the segments of the replicas' state.
        wire_format: how values travel.
        update: what contributions do to the center; by default their mean replaces it.
        fragments: how many parts of the state the rounds exchange in turn; 1 for all of it at once.
    """

    layout: Layout
    wire_format: WireFormat
    update: CenterUpdate = field(default_factory=ReplaceByMean)
    fragments: int = 1

    def require_in_step(self, policy: str, *, in_step: bool) -> None:
        """Check that workers stay in step where this way to travel needs it.

        Args:
            policy: the name of the round policy.
            in_step: whether it keeps them in step.

        Raises:
            ConfigError: it does not; or there are more fragments than values.
        """
        if self.wire_format.replies_changes and not in_step:
            raise ConfigError(
                f"wire format {self.wire_format.name!r} sends workers only the changes of the "
                "center, which they can apply only if they have received every one; with "
                f"{policy} they have not. Use FULL_PRECISION, or CHANGES"
            )
        if self.fragments > 1 and not in_step:
            raise ConfigError(
                f"averaging in {self.fragments} fragments needs workers that stay in step, but "
                f"{policy} lets them drift apart. Use All, or one fragment"
            )
        largest = max((segment.numel for segment in self.layout), default=0)
        if self.fragments > 1 and self.fragments > largest:
            raise ConfigError(
                f"{self.fragments} fragments are too many for the model, which has at most "
                f"{largest} values of any one kind: use fewer"
            )


class Center:
    """The center and one sum: twice the parameters' memory, whatever the number of workers.

    Args:
        spec: how it is laid out, travels and changes.
        center: the initial center, a tensor of ``center_dtype`` per segment; owned from here on.
        world_size: number of workers, which determines the size of chunks.
        memory: what the update remembers; by default it starts fresh. Owned from here on.
        rounds: how many rounds the training has had.
        rounds_of_epoch: how many of these were in the epoch under way.

    Attributes:
        layout: as specified.
        values: the center, a tensor of ``center_dtype`` per segment.
        memory: what the update remembers.
        chunk_bytes: size of the largest message of the center's values, unpacked.
        sum: the sum being formed; None between two rounds.
        rounds_of_epoch: how many rounds were committed in the epoch under way.
    """

    def __init__(
        self,
        spec: CenterSpec,
        center: Sequence[Tensor],
        world_size: int,
        memory: Memory | None = None,
        *,
        rounds: int = 0,
        rounds_of_epoch: int = 0,
    ) -> None:
        layout, wire_format = spec.layout, spec.wire_format
        self.layout = layout
        self.values = list(center)
        self._update = spec.update
        self.memory = new_memory(self._update, layout) if memory is None else memory
        self.chunk_bytes = chunk_bytes(world_size)
        self.sum: Accumulator | None = None
        self.rounds_of_epoch = rounds_of_epoch
        self._rounds = rounds
        self._fragments = plan_fragments(layout, self.chunk_bytes, spec.fragments)
        self._wire_format = wire_format
        self._contributions = [wire_format.contribution(segment) for segment in layout]
        self._replies = [wire_format.reply(segment) for segment in layout]
        self._comes_as_change = [wire_format.sends_changes(segment) for segment in layout]
        # Segments whose mean is a change, or that the update moves; others become the mean.
        self._moves = [
            segment.averaged and (as_change or self._update.updates(segment))
            for segment, as_change in zip(layout, self._comes_as_change, strict=True)
        ]
        self._scales = all(
            as_change
            for segment, as_change in zip(layout, self._comes_as_change, strict=True)
            if segment.averaged
        )
        self._spare = [torch.empty_like(segment) for segment in center]
        self._copy: dict[str, Tensor] = {}
        # The result of the last round as it travels, chunk by chunk.
        self._reply: dict[Chunk, Tensor] = {}
        self._frames: dict[frozenset[str] | None, Frames] = {}

    @property
    def next_fragment(self) -> list[Chunk]:
        """The chunks of the part that the next sum, or the one being formed, covers."""
        return self._fragments[self.rounds_of_epoch % len(self._fragments)]

    def contribution(self, chunk: Chunk) -> Packing:
        """The packing in which a chunk is contributed."""
        return self._contributions[chunk.segment]

    def scale(self, staleness: int) -> float:
        """The factor on a contribution before the mean is formed.

        Args:
            staleness: how often the center has been updated since its worker received it.
        """
        return self._update.scale(staleness) if self._scales else 1.0

    def open_sum(self, ranks: Sequence[int]) -> Accumulator:
        """Begin a sum, in the order of ``ranks``; an uncommitted sum is forgotten."""
        self.sum = Accumulator(
            self.layout, self._contributions, self.next_fragment, self._spare, ranks
        )
        return self.sum

    def commit(self, contributions: Contributions) -> None:
        """Let the sum change the center; without contributions only the update may.

        Args:
            contributions: what the sum consists of.
        """
        assert self.sum is not None
        fragment = self.next_fragment
        self.rounds_of_epoch += 1
        self._rounds += 1
        self._reply, self._frames = {}, {}
        contributions = replace(contributions, round=self._rounds)
        if contributions.weights:
            self.sum.finish()
            self._take_over(fragment, contributions)
        else:
            self._go_on(fragment, contributions)
        self.sum = None
        for chunk in fragment:
            if chunk not in self._reply:
                self._pack(chunk)
        # In the order in which workers read it, not in which it was computed.
        self._reply = {chunk: self._reply[chunk] for chunk in fragment}

    def start_epoch(self) -> None:
        """Start counting the rounds of another epoch."""
        self.rounds_of_epoch = 0

    def _take_over(self, fragment: Sequence[Chunk], contributions: Contributions) -> None:
        """Let the mean of the contributions change the center."""
        share = contributions.share if self._update.by_share else 1.0
        for chunk in fragment:
            if self._moves[chunk.segment]:
                self._move(chunk, contributions, share)
                continue
            if share != 1.0 and self.layout[chunk.segment].averaged:
                chunk.of(self._spare).lerp_(chunk.of(self.values), 1 - share)
            if len(self._fragments) > 1:
                chunk.of(self.values).copy_(chunk.of(self._spare))
        if len(self._fragments) == 1:
            for index, moves in enumerate(self._moves):
                if not moves:
                    self.values[index], self._spare[index] = self._spare[index], self.values[index]

    def _go_on(self, fragment: Sequence[Chunk], contributions: Contributions) -> None:
        """Let a round without contributions change the center."""
        moves_alone = self._update.moves_alone(contributions.round)
        for chunk in fragment:
            segment = self.layout[chunk.segment]
            if moves_alone and segment.averaged and self._update.updates(segment):
                change = chunk.of(self._spare).zero_()
                if not self._comes_as_change[chunk.segment]:
                    change.copy_(chunk.of(self.values))
                self._move(chunk, contributions, 1.0)
            elif self._wire_format.replies_changes:
                chunk.of(self._spare).zero_()

    def _move(self, chunk: Chunk, contributions: Contributions, share: float) -> None:
        """Add a share of a change to the center while both are in the cache."""
        center, change = chunk.of(self.values), chunk.of(self._spare)
        if not self._comes_as_change[chunk.segment]:
            change.sub_(center)
        steps = self._update.updates(self.layout[chunk.segment])
        if share != 1.0 and (steps or self._wire_format.replies_changes):
            change.mul_(share)
            share = 1.0
        if steps:
            kept = {
                name: tensor[chunk.start : chunk.stop]
                for name, tensor in self.memory[chunk.segment].items()
            }
            self._update.step(center, change, kept, contributions)
        if self._wire_format.replies_changes:
            packed = self._pack(chunk)  # as the workers will see it
            change.copy_(self._replies[chunk.segment].unpack(packed, len(change)))
        center.add_(change, alpha=share)

    def reply(self) -> Frames:
        """The result of the last round, as it travels."""
        if None not in self._frames:
            self._frames[None] = _framed(self._reply.values())
        return self._frames[None]

    def state(self, *kinds: str) -> Frames:
        """The center's segments of some kinds, in ``center_dtype``; by default all of them."""
        key = frozenset(kinds)
        if key not in self._frames:
            self._frames[key] = _framed(
                chunk.of(self.values)
                for chunk in plan_chunks(self.layout, self.chunk_bytes)
                if not kinds or self.layout[chunk.segment].kind in kinds
            )
        return self._frames[key]

    def model(self) -> list[Tensor]:
        """A copy of the model's part, without the optimizer's state."""
        return [
            values.clone()
            for segment, values in zip(self.layout, self.values, strict=True)
            if segment.kind != "optimizer"
        ]

    def named(self) -> dict[str, Tensor]:
        """Everything that a checkpoint has to hold of it, by name."""
        return named(self.layout, self.values, self.memory)

    def copy(self) -> dict[str, Tensor]:
        """A copy of ``named``, in the same memory each time."""
        present = self.named()
        if not self._copy:
            self._copy = {name: torch.empty_like(tensor) for name, tensor in present.items()}
        for name, tensor in present.items():
            self._copy[name].copy_(tensor)
        return self._copy

    def _pack(self, chunk: Chunk) -> Tensor:
        """Prepare what the workers are sent, in the form in which it travels."""
        packing = self._replies[chunk.segment]
        changes = self._wire_format.replies_changes and self.layout[chunk.segment].averaged
        outcome = chunk.of(self._spare if changes else self.values)
        self._reply[chunk] = packed = packing.pack(outcome)
        return packed


def _framed(chunks: Iterable[Tensor]) -> Frames:
    frames: Frames = []
    for chunk in chunks:
        octets = octets_of(chunk)
        frames += [values_prefix(octets.nbytes), octets]
    return frames
