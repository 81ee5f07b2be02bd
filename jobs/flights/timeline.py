"""Flights on one clock, and what was known at an instant of it.

Every instant is a whole minute since 1970 in UTC, so nothing here depends on the session's time
zone. What is known of the past is read from a ledger: every line has the minute ``at`` which it
becomes known, the flight to predict is a line at its own moment of prediction, and a window up to
and including that minute cannot hold anything later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from flights.data import FlightTables

NOTICE_MINUTES = 120
"""How long before scheduled departure the prediction is made."""
LATE_MINUTES = 15
"""A delay of this many minutes or more is late: the label, and what every "late" counts."""
DAY_START_MINUTE = 7 * 60
"""A day of traffic begins at 07:00 UTC: two or three in the morning in New York."""
PUERTO_RICO = "America/Puerto_Rico"
"""The zone of BQN, PSE, SJU and STT, the four destinations that ``airports.csv`` lacks."""


def build_legs(tables: FlightTables) -> DataFrame:
    """Put the scheduled flights on one clock.

    Block time is the difference between the two scheduled clock times, each read in its own zone.
    Scheduled arrival plus ``arr_delay`` is then the real arrival (on all of 2013 this agrees to the
    minute with the recorded arrival time, and exceeds the air time by 5 to 235 minutes of taxiing).

    Args:
        tables: the raw tables.

    Returns:
        One row per flight with, in minutes, ``scheduled`` departure, ``moment`` of prediction,
        ``departed`` (null if cancelled), ``arrived`` (null if cancelled or diverted), ``block``
        (scheduled, gate to gate), ``local_minute`` (of the day in New York); ``day`` is the traffic
        day of the moment, ``weekday`` 1 for Sunday to 7.
    """
    departure = F.unix_timestamp(F.to_timestamp("time_hour")) + F.col("minute") * 60
    zone = F.coalesce("tzone", F.lit(PUERTO_RICO))
    there = F.unix_timestamp(F.from_utc_timestamp(F.timestamp_seconds(departure), zone))
    sched_arr = F.col("sched_arr_time")
    arrival_clock = F.floor(sched_arr / 100) * 60 + sched_arr % 100
    legs = tables.flights.join(
        F.broadcast(tables.airports), F.col("dest") == F.col("faa"), "left"
    ).select(
        *("carrier", "flight", "tailnum", "origin", "dest", "distance", "month"),
        *("dep_delay", "arr_delay"),
        (departure / 60).cast("int").alias("scheduled"),
        F.pmod(arrival_clock - there / 60, F.lit(1440)).cast("int").alias("block"),
        (F.col("hour") * 60 + F.col("minute")).alias("local_minute"),
        F.dayofweek(F.make_date("year", "month", "day")).alias("weekday"),
    )
    scheduled = F.col("scheduled")
    return legs.withColumns(
        {
            "moment": scheduled - NOTICE_MINUTES,
            "day": traffic_day(scheduled - NOTICE_MINUTES),
            "departed": (scheduled + F.col("dep_delay")).cast("int"),
            "arrived": (scheduled + F.col("block") + F.col("arr_delay")).cast("int"),
        }
    )


def traffic_day(instant: Column) -> Column:
    """Number the day of traffic that holds an instant (minutes UTC)."""
    return F.floor((instant - DAY_START_MINUTE) / 1440).cast("int")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Numbers that become known at one instant and count for one or more periods from then on."""

    since: Column
    """The minute at which it is known; null for the flights to which it does not happen."""
    adds: Mapping[str, Column]
    """What it adds to each sum, whole numbers."""
    until: Mapping[str, Column | None]
    """Period -> the first minute at which it no longer counts; None if it counts on."""


def running_sums(
    legs: DataFrame,
    events: Sequence[Event],
    places: Mapping[str, Sequence[str]],
    *,
    per_day: bool = True,
) -> DataFrame:
    """Read, for every flight, sums over the events known at its moment of prediction.

    An event enters its sums in the minute when it becomes known and leaves them when its period is
    over, which needs one cheap running sum where sliding windows would add up every event again.

    Args:
        legs: one row per flight; the events are expressions over its columns.
        events: what is summed.
        places: the flights that share a sum, as prefix -> key columns. The keys of the first are
            among those of every other, so that one shuffle serves them all.
        per_day: whether the sums begin at 0 on each traffic day.

    Returns:
        The legs with a column ``place_name_period`` for each sum (a long, 0 without any event).
    """
    lines = [(F.col("moment"), {"leg": F.struct(*legs.columns), "ledger_day": F.col("day")})]
    for event in events:
        day = {"ledger_day": traffic_day(event.since)}
        enter = {
            f"{n}_{period}": amount for period in event.until for n, amount in event.adds.items()
        }
        lines.append((event.since, enter | day))
        for period, until in event.until.items():
            if until is not None:
                leave = {f"{name}_{period}": -amount for name, amount in event.adds.items()}
                lines.append((F.when(event.since.isNotNull(), until), leave | day))
    keys = sorted({key for group in places.values() for key in group})
    ledger = _ledger(legs, keys, lines)
    sums = [name for name in ledger.columns if name not in {*keys, "at", "leg", "ledger_day"}]
    for place, group in places.items():
        known = known_by_then(*group, *(["ledger_day"] if per_day else []))
        ledger = ledger.withColumns(
            {f"{place}_{name}": F.coalesce(F.sum(name).over(known), F.lit(0)) for name in sums}
        )
    results = [f"{place}_{name}" for place in places for name in sums]
    return ledger.where(F.col("leg").isNotNull()).select("leg.*", *results)


def latest_legs(legs: DataFrame) -> DataFrame:
    """Look up the latest legs of the same aircraft, as known at the moment of prediction.

    Args:
        legs: one row per flight.

    Returns:
        The legs with three structs, null if there is none: ``planned`` is the latest leg whose
        scheduled departure is over (scheduled, block), ``left`` the latest to have departed
        (scheduled, departed, delay), ``landed`` the latest to have arrived (scheduled, delay).
        Without a tail number, which only cancelled flights lack, all are null.
    """
    scheduled = F.col("scheduled")
    left = F.struct("scheduled", "departed", F.col("dep_delay").alias("delay"))
    landed = F.struct("scheduled", F.col("arr_delay").alias("delay"))
    lines = [
        (F.col("moment"), {"leg": F.struct(*legs.columns)}),
        (scheduled, {"planned": F.struct("scheduled", "block")}),
        (F.col("departed"), {"left": left}),
        (F.col("arrived"), {"landed": landed}),
    ]
    latest = {
        # The largest struct is the one scheduled last, whatever the order of lines in a minute.
        name: F.when(F.col("tailnum").isNotNull(), F.max(name).over(known_by_then("tailnum")))
        for name in ("planned", "left", "landed")
    }
    ledger = _ledger(legs, ["tailnum"], lines)
    return ledger.withColumns(latest).where(F.col("leg").isNotNull()).select("leg.*", *latest)


def known_by_then(*keys: str) -> WindowSpec:
    """Everything of the same keys up to and including the row's own minute ``at``."""
    return (
        Window.partitionBy(*keys)
        .orderBy("at")
        .rangeBetween(Window.unboundedPreceding, Window.currentRow)
    )


def _ledger(
    legs: DataFrame, keys: Sequence[str], lines: Sequence[tuple[Column, Mapping[str, Column]]]
) -> DataFrame:
    """Write the lines of every flight, each an instant and some values; other values are null."""
    names = sorted({name for _, values in lines for name in values})
    structs = [
        F.struct(at.alias("at"), *(values.get(name, F.lit(None)).alias(name) for name in names))
        for at, values in lines
    ]
    return legs.select(*keys, F.inline(F.array(*structs))).where(F.col("at").isNotNull())
