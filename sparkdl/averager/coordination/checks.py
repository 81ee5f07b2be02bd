"""What workers may do and when, and who of those that are waited for is overdue.

What a worker may not do ends the run, with an error that says why. Nothing here changes a run.
Only the check of the clock asks who is overdue, once a second or so, so that may cost more with
more workers.
"""

from __future__ import annotations

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.rank_states import BEFORE, RankState
from sparkdl.averager.coordination.run_state import RunState
from sparkdl.errors import DeadlineError, ModelError, TrainingError
from sparkdl.events import WindowReport

ONE_LAST_WINDOW = (
    "A strategy must exchange exactly one window with last=True in each epoch, on every rank"
)


def require_same_frozen(run: RunState, member: Member) -> None:
    """Check that a worker has built the same never-sent parameters as all others.

    Raises:
        ModelError: it built others.
    """
    if member.frozen != run.spec.frozen:
        raise ModelError(
            f"{member} built the model with different frozen parameters (no gradient) from "
            "the driver's, or with different values in them. They are never sent, so all must "
            "build the same: does the function given as model read a file that differs on "
            "that host, or draw random numbers that torch's seed does not control? A module "
            "given as model is sent to all as it is"
        )


def require_admitted(run: RunState, member: Member) -> None:
    """Check that a worker has been allowed to start.

    Raises:
        TrainingError: it has not been.
    """
    if member.rank not in run.ranks.admitted:
        raise TrainingError(f"{member} behaves as if it had been told to start, but it has not")


def require_everyone(run: RunState, member: Member, what: str) -> None:
    """Check that nobody whom a worker would wait for has left for good.

    Args:
        run: the run.
        member: the worker.
        what: what it does; follows its name.

    Raises:
        TrainingError: somebody has left.
    """
    if run.left:
        raise TrainingError(
            f"{member} {what}, but {run.members.name(run.left)} had already left the run: "
            "all workers must train the same number of epochs"
        )


def require_window_order(run: RunState, member: Member, report: WindowReport) -> None:
    """Check that a worker may contribute a window now.

    Raises:
        TrainingError: it may not.
    """
    state, in_order = run.ranks[member.rank], BEFORE[RankState.CLOSED]
    if state in in_order and report.epoch == run.committed.epoch and not run.left:
        return
    require_admitted(run, member)
    if state is RankState.CLOSED:
        raise TrainingError(f"{member} closed a window twice")
    require_everyone(run, member, f"contributed a window of epoch {report.epoch}")
    if report.epoch != run.committed.epoch:
        raise TrainingError(
            f"{member} contributed a window of epoch {report.epoch}, but the run is in epoch "
            f"{run.committed.epoch}. {ONE_LAST_WINDOW}"
        )
    raise TrainingError(
        f"rank {member.rank} contributed a window out of order in epoch {report.epoch}, step "
        f"{report.step}"
    )


def require_end_of_epoch(run: RunState, member: Member) -> None:
    """Check that a leaving rank leaves nobody waiting for it.

    Raises:
        TrainingError: it does.
    """
    of = run.ranks.of
    under_way = run.round.entered or of(RankState.CLOSED) or of(RankState.THROUGH)
    if run.gathers.present is not None:
        what = "while others wait for it in an exchange among the workers"
    elif under_way or run.committed.has_windows:
        what = f"before the end of epoch {run.committed.epoch}. {ONE_LAST_WINDOW}"
    else:
        return
    raise TrainingError(f"{member} left the run {what}")


def overdue(run: RunState) -> set[int]:
    """Those that are waited for, and have been silent for longer than they are granted."""
    everyone, is_overdue = run.members.everyone, run.members.overdue
    if not run.started:
        return is_overdue(rank for rank in everyone if rank not in run.shards)
    present = run.gathers.present
    if present is not None:
        return is_overdue(everyone - present)
    if run.epoch_losses.waits_for_driver:
        return set()  # however long a callback takes: that is the user's own code
    if run.epoch_losses.wanted:
        return is_overdue(everyone - run.committed.validated_by)
    return _overdue_in_round(run) - run.left


def _overdue_in_round(run: RunState) -> set[int]:
    this, of, is_overdue = run.round, run.ranks.of, run.members.overdue
    if receiving := of(RankState.RECEIVING):
        return is_overdue(receiving)
    if run.checkpoints.awaited:
        return is_overdue(run.checkpoints.awaited)
    awaited = this.group if this.is_open else run.ranks.active
    late = awaited & of(RankState.TRAINING)
    adding = of(RankState.CONTRIBUTING)
    # Those adding wait for their turns: only the first can always go on, unless it is late
    # itself or held until a checkpoint is written.
    first = min(late | adding | (of(RankState.CLOSED) & awaited), default=None)
    absent: set[int] = set()
    if len(run.ranks.admitted) < run.spec.tolerance.min_workers:
        absent = set(run.members.everyone - run.ranks.admitted)
    elif first is None:
        # Everyone present waits for those who are absent.
        absent = this.pending - run.ranks.admitted
    silent = is_overdue(late | absent)
    if first in adding and run.members.overdue_in_its_turn(first):
        silent.add(first)
    return silent


def drops(run: RunState) -> dict[int, float]:
    """Whom to drop for silence, and how many seconds each was granted; by rank.

    Raises:
        DeadlineError: the run cannot go on without the silent workers.
    """
    members, deadline_s = run.members, run.spec.deadline_s
    silent = overdue(run)
    present = sorted(silent & members.there)
    if not silent:
        return {}
    if not (present and run.spec.tolerance.max_failures and run.started):
        late = (silent - members.joined) or silent
        raise DeadlineError(
            f"{members.name(late)} {what_is_missing(run, late)} within "
            f"{deadline_s:g} s. If it takes longer here, raise the estimator's 'timeout'"
        )
    waiting = run.ranks.windows.keys() | run.round.entered.keys()
    waiting |= run.epoch_losses.wanted.keys() | (run.gathers.present or set())
    if waiting - silent:  # who is not silent has to wait for those who are
        return {rank: members.patience_s(rank) for rank in present}
    # All may be busy, or have trained their last epoch: dropping them would help nobody.
    longest = (rank for rank in present if members.silent_s(rank) >= deadline_s)
    return dict.fromkeys(longest, deadline_s)


def what_is_missing(run: RunState, ranks: set[int]) -> str:
    """What the ranks have failed to do; follows their names."""
    members, joined = run.members, run.members.joined
    if not ranks <= joined:
        return (
            f"did not start ({len(joined)} of {run.spec.world_size} workers did, and all have "
            "to start: are other jobs using the cluster? An executor that "
            "cannot reach the driver says so in its log)"
        )
    if not ranks & members.there:
        reasons = "; ".join(members.last_loss(rank) for rank in sorted(ranks))
        return f"did not come back ({reasons}; is there a free slot to restart it?)"
    if not run.started:
        return "did not receive more of its rows"
    if run.gathers.present is not None:
        return "did not take part in an exchange among the workers"
    epoch, rounds = run.committed.epoch, run.committed.round
    if run.epoch_losses.wanted:
        return f"did not report the loss on its held-out rows after epoch {epoch - 1}"
    if run.ranks.of(RankState.RECEIVING):
        return f"did not take the center of round {rounds}"
    if run.checkpoints.awaited:
        return f"did not send its worker state for the checkpoint before epoch {epoch}"
    return f"did not contribute to round {rounds + 1} (epoch {epoch})"
