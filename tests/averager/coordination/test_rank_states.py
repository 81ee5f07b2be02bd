"""Where a worker may stand, and from where it comes there: the table, and the page with it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from decisions import report

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.rank_states import BEFORE, Ranks, RankState, Window
from sparkdl.errors import TrainingError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"
WAYS = {
    RankState.AWAY: [],
    RankState.READING: [RankState.READING],
    RankState.READY: [RankState.READING, RankState.READY],
    RankState.RECEIVING: [RankState.READING, RankState.READY, RankState.RECEIVING],
}
for before, after in [
    (RankState.RECEIVING, RankState.TRAINING),
    (RankState.TRAINING, RankState.CLOSED),
    (RankState.CLOSED, RankState.CONTRIBUTING),
    (RankState.CONTRIBUTING, RankState.CONTRIBUTED),
    (RankState.CONTRIBUTED, RankState.AT_BARRIER),
    (RankState.CONTRIBUTED, RankState.THROUGH),
    (RankState.TRAINING, RankState.FINISHED),
]:
    WAYS[after] = [*WAYS[before], after]


def brought_to(state: RankState) -> Ranks:
    """Rank 0 of two, the usual way."""
    ranks = Ranks(range(2))
    for after in WAYS[state]:
        ranks.move(0, after)
        if after is RankState.CLOSED:
            ranks.windows[0] = Window(Member(0, "host"), report(0))
    return ranks


def drawing() -> str:
    """The table as the page shows it."""
    rows = ["| A worker is | and was before |", "|---|---|"]
    for after, before in BEFORE.items():
        names = ", ".join(state.value for state in RankState if state in before)
        rows.append(f"| {after.value} | {names} |")
    return "\n".join(rows)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    begin, end = "<!-- begin: states of a rank -->\n", "\n<!-- end: states of a rank -->"
    shown = page.partition(begin)[2].partition(end)[0]
    assert shown == drawing(), f"it should be:\n{drawing()}"


def test_what_the_table_has_happens_and_nothing_else() -> None:
    wrong = []
    for state, after in product(RankState, RankState):
        ranks = brought_to(state)
        expected = after if state in BEFORE[after] else None
        try:
            ranks.move(0, after)
        except TrainingError as error:
            words = f"rank 0 cannot be {after.value} now: it is {state.value}"
            happened = expected is None and str(error) == words and ranks[0] is state
        else:
            happened = ranks[0] is expected
        if not happened:
            wrong.append((state, after))
    assert not wrong


def test_who_is_admitted_active_or_waits_follows_from_the_state() -> None:
    wrong = []
    outside = {RankState.AWAY, RankState.READING, RankState.READY}
    for state in RankState:
        ranks = brought_to(state)
        admitted = set() if state in outside else {0}
        active = set() if state is RankState.THROUGH else admitted
        waits = state.value in ("closed", "contributing", "contributed", "at barrier", "through")
        if (ranks.admitted, ranks.active) != (admitted, active):
            wrong.append(state)
        if (
            bool(ranks.windows) is not waits
            or 0 not in ranks.of(state)
            or len([each for each in RankState if 0 in ranks.of(each)]) != 1
        ):
            wrong.append(state)
    assert not wrong
