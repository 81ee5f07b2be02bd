"""The averager: a service in the driver that holds the center and runs rounds."""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from torch import Tensor

from sparkdl.averager.address import AveragerAddress
from sparkdl.averager.attendance import Event
from sparkdl.averager.codec import Codec
from sparkdl.averager.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.averager.headers import raise_reported_failure, read_join
from sparkdl.averager.kept import KeptState
from sparkdl.averager.members import FencedError, Member, Tolerance
from sparkdl.averager.port import Port
from sparkdl.averager.progress import Progress
from sparkdl.averager.rounds import Rounds
from sparkdl.averager.saving import CheckpointPlan, Resumed
from sparkdl.averager.session import Session
from sparkdl.errors import DeadlineError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds that a worker has to read why it was stopped."""


class Averager:
    """Serve rounds to ``world_size`` workers; a context manager that opens and closes the port.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers.
        codec: how values travel and how the mean becomes the center.
        host: interface to bind to, an address or name of this machine.
        advertised_host: the name under which workers reach it; ``host`` by default.
        deadline_s: the longest that a worker may be silent while it is waited for, in seconds.
        plan: which commits become checkpoints; none by default.
        resumed: the checkpoint with which this process began, if there was one.
        progress: how far the training of ``center`` has come; by default it starts.
        kept: what was kept of each rank at its last commit; by default nothing.
        tolerance: what losses of workers the run survives; none by default.
        tls: whether connections are encrypted.
    """

    def __init__(
        self,
        layout: Layout,
        center: Sequence[Tensor],
        world_size: int,
        codec: Codec,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        deadline_s: float = 600.0,
        plan: CheckpointPlan | None = None,
        resumed: Resumed | None = None,
        progress: Progress | None = None,
        kept: Mapping[int, KeptState] | None = None,
        tolerance: Tolerance | None = None,
        tls: bool = False,
    ) -> None:
        self._rounds = Rounds(
            layout,
            center,
            world_size,
            codec,
            deadline_s,
            progress=progress,
            kept=kept,
            plan=plan,
            tolerance=tolerance,
        )
        self._resumed = resumed
        token = secrets.token_urlsafe(32)
        self._codec = codec
        name = advertised_host or host
        self._port = Port(host, token, self._serve, advertised_host=name, encrypted=tls)
        name = f"[{name}]" if ":" in name else name
        uri = f"tcp://{name}:{self._port.number}"
        self.address = AveragerAddress(uri, token, self._port.fingerprint)

    def __enter__(self) -> Averager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rounds.fail(TrainingError("the driver closed the averager"))
        self._port.close()
        self._rounds.close()

    @property
    def center(self) -> list[Tensor]:
        """The current center, a tensor of ``center_dtype`` a segment."""
        return self._rounds.center

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended, those before a checkpoint included."""
        return self._rounds.history

    @property
    def progress(self) -> Progress:
        """How far the training of ``center`` has come."""
        return self._rounds.progress

    @property
    def kept(self) -> dict[int, KeptState]:
        """What is kept of each rank, to start it again from ``progress``."""
        return self._rounds.kept

    @property
    def losses(self) -> list[str]:
        """Which workers were lost so far, and why."""
        return self._rounds.losses

    @property
    def dropped(self) -> list[int]:
        """The rank of each worker that was dropped for its silence so far, in that order."""
        return self._rounds.dropped

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        return self._rounds.anyone_joined

    def postpone_deadline(self) -> None:
        """Begin anew to count the time in which workers have to join.

        For whoever starts them and knows that they are about to be started.
        """
        self._rounds.postpone_deadline()

    def start(self) -> None:
        """Let the workers train, if they do not, for the facts about their rows were found good."""
        self._rounds.start()

    def approve(self, rank: int) -> None:
        """Let a worker train on rows that arrived while it trains; the answer to ``NewRows``."""
        self._rounds.approve(rank)

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run with ``reason`` as soon as a commit has become a checkpoint."""
        self._rounds.save_and_fail(reason)

    def save_center(self) -> None:
        """After a failure, write a checkpoint of the last commit if that is not one yet."""
        self._rounds.save_center()

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self._rounds.fail(error)

    def events(self) -> Iterator[Event]:
        """Yield what is reported: the data's facts, then windows and epochs until all finished.

        The workers train only after ``start``, which has to follow the facts.

        Raises:
            WorkerError: the user's code raised on a worker.
            WorkerLostError: a worker's connection broke.
            CollectiveError: the exchange among the workers broke.
            DeadlineError: a worker that was waited for was silent for ``deadline_s``.
        """
        interval_s = self._rounds.look_s
        check_at = time.monotonic() + interval_s
        while True:
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + interval_s
                try:
                    self._rounds.check_deadline()
                except DeadlineError as error:
                    self._rounds.fail(error)
            try:
                event = self._rounds.events.get(timeout=interval_s)
            except queue.Empty:
                continue
            if event is not None:
                yield event
            elif self._rounds.failure is not None:
                raise self._rounds.failure
            else:
                return

    def _serve(self, connection: Connection) -> None:
        """Serve one worker from joining to leaving; its thread runs this."""
        member: Member | None = None
        try:
            hello = connection.receive_header()
            raise_reported_failure(hello)
            member = self._rounds.join(*read_join(hello), connection.interrupt)
            Session(member, connection, self._rounds, self._codec, self._resumed).run()
        except FencedError as error:
            self._say_farewell(connection, error)
        except SparkDLError as error:
            self._rounds.fail(error)
            self._say_farewell(connection, self._rounds.failure or error)
        except (ConnectionLostError, SilenceError) as error:
            if member is None:
                logger.info("a worker left before it had joined: %s", error)
                return
            self._rounds.lose(
                member,
                f"ended its connection in the middle of training ({error}). The executor's log "
                "says why",
            )
        except Exception as error:  # a mistake of ours must not leave the driver waiting
            name = "a worker" if member is None else f"rank {member.rank}"
            self._rounds.fail(TrainingError(f"the averager's thread for {name}: {error!r}"))
            raise

    @staticmethod
    def _say_farewell(connection: Connection, reason: SparkDLError) -> None:
        try:
            connection.send_header({"stopped": str(reason)})
            connection.close_after(FAREWELL_S)
        except (ConnectionLostError, SilenceError) as error:
            logger.debug("a worker left before it was told why: %s", error)
