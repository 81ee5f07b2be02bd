"""``model.summary``: a fit's summary, once it is over."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sparkdl.events import EpochSummary
from sparkdl.phases import PHASES
from sparkdl.report.findings import findings
from sparkdl.report.history import values_of
from sparkdl.report.page import save_report
from sparkdl.report.recording import Recording

if TYPE_CHECKING:
    import pandas as pd

    from sparkdl.planner.plan import Plan
    from sparkdl.planner.profile import Profile


class TrainingSummary:
    """A summary of a fit: epochs, workers, sizes and times.

    Args:
        recording: of the fit.

    Attributes:
        recording: as given; the report is drawn from it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch, by its number, including those before a checkpoint.

        The columns are those of ``EpochSummary`` and ``examples_per_second``.
        """
        import pandas as pd

        rows = [
            {**values_of(epoch), "examples_per_second": epoch.examples_per_second}
            for epoch in self.recording.history
        ]
        columns = [*values_of(_NO_EPOCH), "examples_per_second"]
        frame = pd.DataFrame(rows, columns=list(rows[0]) if rows else columns)
        return frame.set_index("epoch")

    @property
    def workers(self) -> pd.DataFrame:
        """One row per worker, by its rank.

        The columns are ``host``; ``rows``, the training rows that it read, before workers exchange
        any; ``examples``, trained on in all epochs of this fit; ``windows``; the seconds in each
        phase (``read``, ``decode``, ``compute``, ``wait``, ``exchange``, ``idle``); ``sent_bytes``
        to the driver and ``received_bytes`` from it; and ``losses``, how often it was lost.
        """
        import pandas as pd

        recording = self.recording
        shard_rows = recording.shard_rows or (0,) * recording.world_size
        lost = [failure.rank for failure in recording.failures]
        frame = pd.DataFrame(
            {
                "host": recording.hosts,
                "rows": shard_rows,
                "examples": recording.rows,
                "windows": recording.windows,
                **{name: recording.seconds[:, k] for k, name in enumerate(PHASES)},
                "sent_bytes": recording.sent,
                "received_bytes": recording.received,
                "losses": [lost.count(rank) for rank in range(recording.world_size)],
            }
        )
        frame.index.name = "rank"
        return frame

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the start of the workers to the end of the last epoch."""
        return self.recording.duration_s

    @property
    def examples_per_second(self) -> float:
        """Rows per second of all workers together, over the epochs of this fit."""
        epochs = self.recording.history[self.recording.epochs_before :]
        seconds = sum(epoch.seconds for epoch in epochs)
        return sum(epoch.examples for epoch in epochs) / seconds if seconds else 0.0

    @property
    def rows(self) -> int:
        """Rows trained on per epoch."""
        return sum(self.recording.shard_rows)

    @property
    def held_out_rows(self) -> int:
        """Rows used for validation."""
        return self.recording.held_out_rows

    @property
    def num_workers(self) -> int:
        """Replicas that were trained."""
        return self.recording.world_size

    @property
    def parameters(self) -> int:
        """Numbers in the model that are trained or frozen."""
        return self.recording.setup.parameters

    @property
    def model_bytes(self) -> int:
        """Bytes of the model's parameters and buffers."""
        return self.recording.setup.model_bytes

    @property
    def bound_by(self) -> str:
        """What took the most time, and what would help, in words."""
        return str(findings(self.recording)[0])

    @property
    def profile(self) -> Profile:
        """What this fit has cost, by step and round: what plans and simulations start from.

        ``open(path, "w").write(model.summary.profile.to_json())`` keeps it for later.

        Raises:
            ConfigError: no epoch has ended in this fit.
        """
        from sparkdl.planner.profile import Profile

        return Profile.of(self.recording)

    def plan(self, *others: TrainingSummary | Profile, **options: Any) -> Plan:
        """Predict epochs with other numbers of workers, periods and links, from this fit alone.

        Nothing is run. With the summary of a second fit on another number of workers, what rounds
        take is told apart by what is sent and what is not; see the guide to planning.

        Args:
            *others: of other fits of the same model and strategy.
            **options: ``link``, ``measured_on``, ``workers``, ``rows`` and ``batch_size``, as of
                :class:`sparkdl.planner.plan.Plan`.

        Raises:
            ConfigError: a fit has no epoch, another model or strategy, a strategy without a formula
                for what it sends, or something given cannot be planned for.
        """
        from sparkdl.planner.plan import Plan

        profiles = (x.profile if isinstance(x, TrainingSummary) else x for x in (self, *others))
        return Plan([*profiles], **options)

    def save_report(self, path: str | os.PathLike[str]) -> None:
        """Write all of this as one HTML page, which can be read without a network.

        Args:
            path: where to write it; a URI that pyarrow.fs takes, or a path in the driver.
        """
        save_report(self.recording, path)

    def __repr__(self) -> str:
        recording = self.recording
        return (
            f"TrainingSummary({recording.setup.model or 'model'}: {len(recording.history)} epochs, "
            f"{self.rows} rows, {self.num_workers} workers, {self.seconds:.1f} s, "
            f"{self.examples_per_second:.0f} rows/s. {self.bound_by})"
        )


_NO_EPOCH = EpochSummary(epoch=0, loss=0.0, examples=0, rounds=0, seconds=0.0)
