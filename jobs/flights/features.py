"""What is known of a flight two hours before its scheduled departure, as numbers.

``FEATURES`` lists every numeric feature with its SQL over the columns that ``build_features`` puts
together, and with the instant at which it is known. One assumption is about the data: the recorded
tail number is the aircraft that flew, taken to be assigned two hours before.
"""

from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from flights.data import WEATHER_COLUMNS, FlightTables
from flights.timeline import LATE_MINUTES, Event, build_legs, latest_legs, running_sums

CATEGORIES = ("carrier", "origin", "dest")
"""The columns that the network embeds."""
HISTORY_MINUTES = 28 * 24 * 60
"""How far back a flight number's own record goes."""
TURNAROUND_HOURS = 20
"""An aircraft's previous leg counts if it was scheduled less than this before the flight."""


class Feature(NamedTuple):
    """One numeric feature."""

    name: str
    sql: str
    """An expression over the columns of ``gather``; null if unknown."""
    known: str
    """What it is and when it is known."""


def _traffic(place: str, kind: str, period: str, known: str) -> list[Feature]:
    """Count, mean delay and late share; two flights on time are added so that few say little."""
    count, delay, late = (f"{place}_{kind}{what}_{period}" for what in ("s", "_delay", "s_late"))
    name = f"{place}_{kind}_{period}"
    return [
        Feature(f"{name}_count", f"ln(1 + {count})", f"log of the {known}"),
        Feature(f"{name}_delay", f"{delay} / (2 + {count})", f"mean delay of the {known}"),
        Feature(f"{name}_late", f"{late} / (2 + {count})", f"late share of the {known}"),
    ]


def _overdue(place: str, known: str) -> list[Feature]:
    """Flights that should have left and have not; a cancelled one counts for three hours."""
    count, since = f"{place}_overdue_now", f"{place}_overdue_since_now"
    minutes = f"ln(1 + {count} * moment - {since})"
    return [
        Feature(f"{place}_overdue_count", f"ln(1 + {count})", f"log of the {known}"),
        Feature(f"{place}_overdue_minutes", minutes, f"log of the minutes by which the {known}"),
    ]


SCHEDULE = [
    Feature("hour_sin", "sin(2 * pi() * local_minute / 1440)", "time of day: the schedule"),
    Feature("hour_cos", "cos(2 * pi() * local_minute / 1440)", "time of day: the schedule"),
    Feature("minute", "local_minute", "time of day: the schedule"),
    *(
        Feature(f"weekday_{day}", f"weekday = {day}", "1 on that weekday: the schedule")
        for day in range(1, 8)
    ),
    Feature("distance", "ln(distance)", "log of miles: the schedule"),
    Feature("block", "block", "scheduled minutes from gate to gate: the schedule"),
    Feature("padding", "block - distance / 8", "block beyond 480 miles an hour: the schedule"),
    Feature("demand", "demand", "departures scheduled at the origin in the same clock hour"),
]
WEATHER = [
    *(
        Feature(name, name, f"{name} in the last hour that is over")
        for name in ("temp", "dewp", "humid", "wind_speed", "visib", "pressure")
    ),
    Feature("gust", "coalesce(wind_gust, 0)", "gusts, 0 if none, in the last hour that is over"),
    Feature("wind_east", "wind_speed * sin(radians(wind_dir))", "in the last hour that is over"),
    Feature("wind_north", "wind_speed * cos(radians(wind_dir))", "in the last hour that is over"),
    Feature("rain", "ln(1 + 100 * precip)", "rain or snow in the last hour that is over"),
    Feature("rain_3h", "ln(1 + 100 * precip_3h)", "in the last three hours that are over"),
    Feature("visib_3h", "visib_3h", "lowest visibility in the last three hours that are over"),
    Feature("temp_change", "temp - temp_before", "against three hours before"),
    Feature("pressure_change", "pressure - pressure_before", "against three hours before"),
    Feature("no_pressure", "pressure is null", "1 if the hour has no pressure reading"),
]
PREVIOUS = f"(planned is not null and scheduled - planned.scheduled < {TURNAROUND_HOURS * 60})"
HAS_LEFT = f"({PREVIOUS} and left is not null and left.scheduled = planned.scheduled)"
BACK = f"(if({HAS_LEFT}, left.departed, greatest(planned.scheduled, moment)) + 2 * planned.block)"
AIRCRAFT = [
    Feature("seats", "ln(seats)", "log of seats: the aircraft's record"),
    Feature("age", "2013 - built", "years: the aircraft's record"),
    Feature("no_record", "seats is null", "1 if the aircraft has no record"),
    *(
        Feature(f"made_by_{make}", f"coalesce(manufacturer ilike '{make}%', false)", "its record")
        for make in ("boeing", "airbus", "embraer", "bombardier")
    ),
    Feature("previous_leg", PREVIOUS, "1 if a leg from New York was due in the last 20 hours"),
    Feature("previous_left", HAS_LEFT, "1 if that leg has left by the moment"),
    Feature("previous_not_left", f"{PREVIOUS} and not {HAS_LEFT}", "1 if it has not by the moment"),
    Feature(
        "previous_delay",
        f"if({HAS_LEFT}, least(left.delay, 240), 0)",
        "departure delay of that leg, if it has left by the moment",
    ),
    Feature(
        "landed_delay",
        f"if({PREVIOUS} and scheduled - landed.scheduled < {TURNAROUND_HOURS * 60}, "
        "least(landed.delay, 240), 0)",
        "arrival delay of the latest leg that has landed by the moment",
    ),
    Feature(
        "not_back",
        f"if({PREVIOUS}, moment < {BACK}, false)",
        "1 if out and straight back takes longer than until the moment",
    ),
    Feature(
        "slack",
        f"if({PREVIOUS}, greatest(least(scheduled - {BACK}, 480), -240), 480)",
        "minutes left if it flies straight back, from what is known at the moment",
    ),
    Feature(
        "tight_slack",
        f"if({PREVIOUS}, greatest(least(scheduled - {BACK}, 60), -240), 60)",
        "the same, no more than an hour",
    ),
    Feature(
        "planned_slack",
        f"if({PREVIOUS}, "
        "greatest(least(scheduled - planned.scheduled - 2 * planned.block, 480), -240), 480)",
        "the same on time: the schedule",
    ),
]
TRAFFIC = [
    *_traffic("origin", "departure", "today", "departures at the origin today, by the moment"),
    *_traffic("origin", "departure", "1h", "departures at the origin in the hour to the moment"),
    *_traffic("origin", "departure", "3h", "departures at the origin in the 3 h to the moment"),
    *_traffic("origin", "arrival", "3h", "arrivals from the origin in the 3 h to the moment"),
    *_overdue("origin", "flights overdue at the origin at the moment"),
    *_traffic("carrier", "departure", "1h", "carrier's departures in the hour to the moment"),
    *_traffic("carrier", "departure", "3h", "carrier's departures in the 3 h to the moment"),
    *_traffic("carrier", "arrival", "3h", "carrier's arrivals in the 3 h to the moment"),
    *_overdue("carrier", "carrier's flights overdue at the origin at the moment"),
    *_traffic("route", "arrival", "today", "arrivals on the route today, by the moment"),
    *_traffic("dest", "arrival", "today", "arrivals at the destination today, by the moment"),
    *_traffic("number", "arrival", "28d", "flight number's arrivals in 28 days to the moment"),
]
FEATURES: tuple[Feature, ...] = (*SCHEDULE, *WEATHER, *AIRCRAFT, *TRAFFIC)


def build_features(tables: FlightTables) -> DataFrame:
    """Compute the features of every flight whose outcome is known.

    Cancelled and diverted flights have no ``arr_delay``: they are not predicted, but they count in
    the history as the flights that they were seen to be (overdue until three hours have passed).

    Args:
        tables: the raw tables.

    Returns:
        One row per flight with ``label`` (double: 1 if it arrived 15 minutes late or more), what
        identifies it (``month``, ``carrier``, ``flight``, ``origin``, ``dest``, ``scheduled`` in
        minutes UTC) and ``known``: ``FEATURES`` in order as array<float>, null where unknown.
    """
    outcome = (F.col("arr_delay") >= LATE_MINUTES).cast("double").alias("label")
    known = F.array(*(F.expr(f"float({feature.sql})") for feature in FEATURES)).alias("known")
    return (
        gather(tables)
        .where(F.col("arr_delay").isNotNull())
        .select(outcome, "month", "carrier", "flight", "origin", "dest", "scheduled", known)
    )


def gather(tables: FlightTables) -> DataFrame:
    """Bring beside every flight what was known of it at its moment of prediction."""
    legs = build_legs(tables)
    hour = F.floor(F.col("scheduled") / 60)
    demand = legs.groupBy("origin", hour.alias("hour")).agg(F.count("*").alias("demand"))
    planes = tables.planes.select("tailnum", F.col("year").alias("built"), "manufacturer", "seats")
    known = running_sums(
        legs,
        [_outcome("arrival", {"28d": HISTORY_MINUTES})],
        {"number": ["carrier", "flight", "origin"]},
        per_day=False,
    )
    known = latest_legs(known)
    known = running_sums(
        known,
        [_outcome("arrival", {"today": None})],
        {"dest": ["dest"], "route": ["dest", "origin"]},
    )
    known = running_sums(
        known,
        [
            _outcome("departure", {"today": None, "1h": 60, "3h": 180}),
            _outcome("arrival", {"3h": 180}),
            _overdue_event(),
        ],
        {"origin": ["origin"], "carrier": ["origin", "carrier"]},
    )
    return (
        known.withColumns({"hour": hour, "last_hour": F.floor(F.col("moment") / 60) - 1})
        .join(F.broadcast(demand), ["origin", "hour"], "left")
        .join(F.broadcast(latest_weather(tables.weather)), ["origin", "last_hour"], "left")
        .join(F.broadcast(planes), "tailnum", "left")
    )


def _outcome(kind: str, periods: dict[str, int | None]) -> Event:
    """Departures or arrivals: how many, how late, and how many of them 15 minutes or more."""
    at, delay = {"departure": ("departed", "dep_delay"), "arrival": ("arrived", "arr_delay")}[kind]
    # One flight that waits until the next morning should not speak for all of an airport.
    moderate = F.greatest(F.least(F.col(delay), F.lit(180)), F.lit(-15)).cast("int")
    return Event(
        since=F.col(at),
        adds={
            f"{kind}s": F.lit(1),
            f"{kind}_delay": moderate,
            f"{kind}s_late": (F.col(delay) >= LATE_MINUTES).cast("int"),
        },
        until={
            period: None if minutes is None else F.col(at) + minutes
            for period, minutes in periods.items()
        },
    )


def _overdue_event() -> Event:
    """Not departed though scheduled to; that it will never depart is not known, so forget it."""
    scheduled, departed = F.col("scheduled"), F.col("departed")
    waits: Column = departed.isNull() | (departed > scheduled)
    return Event(
        since=F.when(waits, scheduled),
        adds={"overdue": F.lit(1), "overdue_since": scheduled},
        until={"now": F.least(departed, scheduled + 180)},
    )


def latest_weather(weather: DataFrame) -> DataFrame:
    """Fill the hours without a record from the last hour that has one.

    Args:
        weather: the raw table.

    Returns:
        One row per origin and ``last_hour`` (hours since 1970, UTC) with that hour's weather, the
        temperature and pressure three hours before, and the rain and lowest visibility of three
        hours. A record is known when its hour is over.
    """
    names = [name for name in WEATHER_COLUMNS if name not in ("origin", "time_hour")]
    hour = (F.unix_timestamp(F.to_timestamp("time_hour")) / 3600).cast("bigint")
    records = weather.select("origin", hour.alias("last_hour"), F.struct(*names).alias("record"))
    ends = F.sequence(F.min("last_hour"), F.max("last_hour") + 24)
    grid = records.groupBy("origin").agg(F.explode(ends).alias("last_hour"))
    past = Window.partitionBy("origin").orderBy("last_hour")
    three_hours = past.rangeBetween(-2, 0)
    record = F.last("record", ignorenulls=True)
    return (
        grid.join(records, ["origin", "last_hour"], "left")
        .select(
            "origin",
            "last_hour",
            record.over(past).alias("record"),
            record.over(past.rangeBetween(Window.unboundedPreceding, -3)).alias("before"),
            F.sum("record.precip").over(three_hours).alias("precip_3h"),
            F.min("record.visib").over(three_hours).alias("visib_3h"),
        )
        .select(
            *("origin", "last_hour", "record.*", "precip_3h", "visib_3h"),
            F.col("before.temp").alias("temp_before"),
            F.col("before.pressure").alias("pressure_before"),
        )
    )
