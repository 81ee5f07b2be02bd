"""Where a worker may stand, and what may change that: the table, and the page that shows it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from decisions import report

from sparkdl.averager.coordination.events import Member, WindowClosed
from sparkdl.averager.coordination.rank_states import TRANSITIONS, Move, Ranks, RankState
from sparkdl.errors import TrainingError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"
WAYS = {
    RankState.AWAY: [],
    RankState.READING: [Move.JOIN],
    RankState.READY: [Move.JOIN, Move.READ],
    RankState.RECEIVING: [Move.JOIN, Move.READ, Move.LET_IN],
}
WAYS[RankState.TRAINING] = [*WAYS[RankState.RECEIVING], Move.TAKE]
WAYS[RankState.CLOSED] = [*WAYS[RankState.TRAINING], Move.CLOSE]
WAYS[RankState.CONTRIBUTING] = [*WAYS[RankState.CLOSED], Move.ENTER]
WAYS[RankState.CONTRIBUTED] = [*WAYS[RankState.CONTRIBUTING], Move.COMPLETE]
WAYS[RankState.AT_BARRIER] = [*WAYS[RankState.CONTRIBUTED], Move.COMMIT]
WAYS[RankState.THROUGH] = [*WAYS[RankState.CONTRIBUTED], Move.END_EPOCH]
WAYS[RankState.FINISHED] = [*WAYS[RankState.TRAINING], Move.FINISH]


def brought_to(state: RankState) -> Ranks:
    """Rank 0 of two, the usual way."""
    ranks = Ranks(range(2))
    for how in WAYS[state]:
        ranks.move(0, how)
        if how is Move.CLOSE:
            ranks.windows[0] = WindowClosed(Member(0, "host"), report(0))
    return ranks


def drawing() -> str:
    """The table as the page shows it."""
    rows = ["| A worker | is then | if it was |", "|---|---|---|"]
    for how, changes in TRANSITIONS.items():
        for after in dict.fromkeys(changes.values()):
            before = [state.value for state in RankState if changes.get(state) is after]
            rows.append(f"| {how.value} | {after.value} | {', '.join(before)} |")
    return "\n".join(rows)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    begin, end = "<!-- begin: states of a rank -->\n", "\n<!-- end: states of a rank -->"
    shown = page.partition(begin)[2].partition(end)[0]
    assert shown == drawing(), f"it should be:\n{drawing()}"


def test_what_the_table_has_happens_and_nothing_else() -> None:
    wrong = []
    for state, how in product(RankState, Move):
        ranks = brought_to(state)
        expected = TRANSITIONS[how].get(state)
        try:
            ranks.move(0, how)
        except TrainingError as error:
            words = f"rank 0 {how.value} out of order: it is {state.value}"
            happened = expected is None and str(error) == words and ranks[0] is state
        else:
            happened = ranks[0] is expected
        if not happened:
            wrong.append((state, how))
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
