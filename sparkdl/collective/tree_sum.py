"""Sums along trees of several colours, in chunks, over the messages of a gloo group.

Kumar et al. 2017, "Efficient Training of Convolutional Neural Nets on Large Distributed Systems"
(arXiv 1711.00705): the values are cut into k slices, a slice is added up its own k-ary tree and
sent down again, and the trees are chosen so that a member has children in at most one of them. The
paper's own construction is not known to us; this one is:

    Members are numbered 0..N-1. In every tree the children of position p are k p + 1 .. k p + k,
    so the first I = ceil((N - 1) / k) positions have children. Colour c puts member
    (p + c I) mod N at position p; its members with children are c I .. (c + 1) I - 1.

These are disjoint if k I <= N, which holds if N mod k is 0 or 1, and so for two colours whatever N
is (the double binary tree). Where it does not hold for the k that was asked for, the largest
smaller one is taken for which it does.

A member sends up at most a slice in each of k trees, and down at most k copies of the slice of the
one tree in which it has children: at most 2 W for W bytes, where a ring sends 2 W (N - 1) / N. All
have the sum after 2 ceil(log_k N) messages that wait for each other, where a ring has 2 (N - 1).

One thread runs all trees of a member. It takes the events of a sum, "add up chunk j and send it
up", "receive chunk j and send it down", in the order of the steps in which they would come if every
message took one step. A member at depth d of a tree of height H has

    up    at step  j + H - d        after its children, at depth d + 1
    down  at step  j + H + d        after its parent, at depth d - 1

so waiting in this order never waits for what is itself waiting. Members without children have
nothing to wait for on the way up, and offer their chunks before. gloo sends a message once the
other end has said where to put it, which here is ``AHEAD`` chunks before it is needed.

The sum of a chunk is own + first child's + second child's ..., up to the root, and the root's is
what all receive: the same bits on all members, and the same in every run.
"""

from __future__ import annotations

import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

AHEAD = 4
"""Chunks of each child for which there is room at a time."""
_FIRST_TAG = 7000
"""Tags from here on are used, two for each tree."""


@dataclass(frozen=True)
class Place:
    """A member's place in one tree.

    Attributes:
        parent: the member to which it sends its sum, and from which it has the whole one; None at
            the root.
        children: the members of which it adds up the sums.
        depth: how many messages the root is away.
    """

    parent: int | None
    children: tuple[int, ...]
    depth: int


def usable_colors(members: int, wanted: int) -> int:
    """The largest number of trees up to ``wanted`` in which nobody has children twice."""
    colors = range(min(members, wanted), 0, -1)
    return next(each for each in colors if members % each in (0, 1) or each == 1)


def place_of(member: int, color: int, *, members: int, colors: int) -> Place:
    """A member's place in the tree of one colour.

    Args:
        member: its number, 0..members-1.
        color: 0..colors-1.
        members: N.
        colors: k, one of ``usable_colors``.
    """
    shift = color * -(-(members - 1) // colors)
    position = (member - shift) % members
    below = range(colors * position + 1, min(colors * position + colors + 1, members))
    return Place(
        parent=((position - 1) // colors + shift) % members if position else None,
        children=tuple((each + shift) % members for each in below),
        depth=_depth(position, colors),
    )


def height_of(members: int, colors: int) -> int:
    """The depth of the member that is farthest from the root."""
    return _depth(members - 1, colors)


def _depth(position: int, colors: int) -> int:
    depth = 0
    while position:
        position, depth = (position - 1) // colors, depth + 1
    return depth


class TreeSum:
    """Adds up the tensors of a group's members.

    Args:
        group: of gloo, for this alone; every member must make one. Half of what is used of it is
            missing in torch's type hints.
        colors: how many trees are asked for.
        chunk_bytes: size of a message; at least a value of each tensor.

    Attributes:
        places: this member's, in each tree.
    """

    def __init__(self, group: Any, colors: int, chunk_bytes: int) -> None:
        members = group.size()
        colors = usable_colors(members, colors)
        self.places = [
            place_of(group.rank(), color, members=members, colors=colors) for color in range(colors)
        ]
        self._group = group
        self._thread = ThreadPoolExecutor(1, "sparkdl-trees")
        self._height = height_of(members, colors)
        self._chunk_bytes = chunk_bytes

    def __call__(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the sum of all members' tensors and return it.

        Every member has to call it with the same number of values of the same dtype, and as often
        and in the same order as the others.

        Args:
            tensor: on the CPU, of any shape and dtype; in half precision, partial sums are rounded.

        Raises:
            RuntimeError: gloo's, a member did not take part in time or is lost.
        """
        try:
            self._add_up(tensor)
        except BaseException as error:
            # Those who wait for this member notice once nothing holds a connection.
            traceback.clear_frames(error.__traceback__)
            self._group = None
            raise
        return tensor

    def begin(self, tensor: Tensor) -> Future[Tensor]:
        """Begin the same in a thread, after the sums that were begun before; returns its future."""
        done: Future[Tensor] = Future()

        def run() -> None:
            try:
                done.set_result(self(tensor))
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(run)
        # C++ code that waits sees an error only if a callback has raised it.
        return done.then(lambda each: each.value())

    def close(self) -> None:
        """End the thread, and the connections to the others."""
        self._group = None
        self._thread.shutdown(wait=False)

    def _add_up(self, tensor: Tensor) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("gloo/: a sum in trees has failed before")
        flat = tensor.detach().reshape(-1)
        chunk = max(1, min(self._chunk_bytes // flat.element_size(), len(flat)))
        parts = [
            torch.split(part, chunk) for part in flat.tensor_split(len(self.places)) if len(part)
        ]
        lanes = [
            _Lane(group, _FIRST_TAG + 2 * color, place, part)
            for color, (place, part) in enumerate(zip(self.places, parts, strict=False))
        ]
        events = []
        for color, lane in enumerate(lanes):
            place = lane.place
            up = self._height - place.depth if place.children else -AHEAD
            down = self._height + place.depth
            for number in range(len(lane.chunks)):
                events += [(number + up, 0, color, number), (number + down, 1, color, number)]
        for _, goes_down, color, number in sorted(events):
            (lanes[color].down if goes_down else lanes[color].up)(number)
        for lane in lanes:
            lane.finish()
        if flat.data_ptr() != tensor.data_ptr():  # it was not contiguous
            tensor.copy_(flat.view(tensor.shape))


@dataclass
class _Lane:
    """One tree's part of a sum, as one member sees it."""

    group: Any
    tag: int
    place: Place
    chunks: tuple[Tensor, ...]
    sent: list[dist.Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._coming: deque[list[tuple[dist.Work, Tensor]]] = deque()
        for chunk in self.chunks[:AHEAD] if self.place.children else ():
            self._expect([torch.empty_like(chunk) for _ in self.place.children])
        # What arrives in a chunk's place has its own in it, so that has been sent by then.
        parent = self.place.parent
        self._sums = [] if parent is None else [self._receive(c, parent, 1) for c in self.chunks]

    def up(self, number: int) -> None:
        """Add the children's sums of a chunk to this member's, and send them on."""
        chunk = self.chunks[number]
        if self.place.children:
            arrived = self._coming.popleft()
            for work, values in arrived:
                work.wait()
                chunk.add_(values)
            if number + AHEAD < len(self.chunks):
                size = len(self.chunks[number + AHEAD])
                self._expect([values[:size] for _, values in arrived])
        if self.place.parent is not None:
            self._send(chunk, self.place.parent, 0)

    def down(self, number: int) -> None:
        """Receive the sum of a chunk, and send it on."""
        if self.place.parent is not None:
            self._sums[number].wait()
        for child in self.place.children:
            self._send(self.chunks[number], child, 1)

    def finish(self) -> None:
        """Wait until all has left."""
        for work in self.sent:
            work.wait()

    def _expect(self, room: list[Tensor]) -> None:
        from_all = zip(self.place.children, room, strict=True)
        self._coming.append([(self._receive(each, child, 0), each) for child, each in from_all])

    def _receive(self, values: Tensor, member: int, way: int) -> dist.Work:
        work: dist.Work = self.group.recv([values], member, self.tag + way)
        return work

    def _send(self, values: Tensor, member: int, way: int) -> None:
        self.sent.append(self.group.send([values], member, self.tag + way))
