"""How a DataFrame's rows get to the tasks that want them, and why.

Each task reads whole partitions, several if there are more of them than tasks, and the workers
exchange the rows among themselves (``reshuffle``): each row is read once, and travels once, in its
final form. Spark's shuffle would write, read and sort it as a JVM row. It remains for what cannot
be done otherwise, and for those who want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from sparkdl.errors import ConfigError

SHUFFLES = ("exchange", "spark", "none")
"""The values that ``shuffleRows`` may have."""


class Way(Enum):
    """How there come to be as many partitions as tasks."""

    AS_IT_IS = auto()
    """The DataFrame already has as many: each task reads one."""
    GROUPED = auto()
    """A task reads several, one after another, or none."""
    MOVED = auto()
    """Spark's shuffle takes whole partitions to the tasks that would otherwise have read them, so
    that each has the same rows, in the same order."""
    SHUFFLED = auto()
    """Spark's shuffle makes new ones."""


@dataclass(frozen=True)
class Delivery:
    """How one DataFrame's rows get to the workers.

    Attributes:
        way: how there come to be as many partitions as tasks.
        exchanged: whether the workers then exchange the rows among themselves.
        stays: whether the rows must not be moved in any other way either.
        reason: why Spark shuffles them, if it does.
    """

    way: Way = Way.AS_IT_IS
    exchanged: bool = False
    stays: bool = False
    reason: str = ""

    def shuffled(self, reason: str) -> Delivery:
        """The delivery to use instead where the rows cannot be read as they are.

        Rows that were to be exchanged still are: the workers may have been told so.

        Raises:
            ConfigError: the rows are to stay where they are.
        """
        if self.stays:
            raise ConfigError(
                "shuffleRows='none' leaves rows in their partitions, but those cannot be read "
                f"as they are: {reason}. Drop shuffleRows"
            )
        way = Way.MOVED if self.way is Way.AS_IT_IS else Way.SHUFFLED
        return Delivery(way, self.exchanged, reason=reason)


def delivery_of(
    partitions: int | None, tasks: int, ranks_a_task: int, wish: str, gang_start_for: str | None
) -> Delivery:
    """Choose the way.

    Which rows a task gets does not depend on ``gang_start_for``, only the way they take to it.

    Args:
        partitions: of the DataFrame; None if Spark only decides while it runs.
        tasks: the number of tasks that will read them.
        ranks_a_task: ranks per task.
        wish: one of ``SHUFFLES``.
        gang_start_for: what needs a gang-scheduled start, which Spark's barrier mode allows for
            few lineages; None if nothing does.

    Raises:
        ConfigError: the rows are to stay where they are, but cannot.
    """
    exchanged, stays = wish == "exchange" and tasks * ranks_a_task > 1, wish == "none"
    if partitions == tasks:
        return Delivery(Way.AS_IT_IS, exchanged, stays)
    found = "" if partitions is None else f"{partitions} "
    if wish == "spark":
        return Delivery(
            Way.SHUFFLED, reason=f"shuffleRows is 'spark', and {tasks} tasks read {found}partitions"
        )
    if gang_start_for is None:
        return Delivery(Way.GROUPED, exchanged, stays)
    if stays:
        if partitions is not None:
            require_one_each(partitions, tasks)
        return Delivery(Way.GROUPED, stays=True)
    return Delivery(
        Way.MOVED,
        exchanged,
        reason=f"{gang_start_for} needs a gang-scheduled start, and Spark's barrier mode, which "
        f"provides it, cannot have {tasks} tasks read {found}partitions",
    )


def require_one_each(partitions: int, tasks: int) -> None:
    """Refuse any other number of partitions where barrier mode needs exactly one per task.

    Raises:
        ConfigError: there are more or fewer partitions than tasks.
    """
    if partitions != tasks:
        raise ConfigError(
            "shuffleRows='none' leaves rows in their partitions, but the DataFrame has "
            f"{partitions} for {tasks} tasks that need a gang-scheduled start, and Spark's "
            "barrier mode gives each exactly one. Drop shuffleRows, or make as many partitions "
            f"as tasks: df.repartition({tasks})"
        )
