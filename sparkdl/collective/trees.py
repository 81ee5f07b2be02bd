"""Trees of several colours, along which the members of a group add up values and send the sum.

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
"""

from __future__ import annotations

from dataclasses import dataclass


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
