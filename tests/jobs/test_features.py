"""The features against a row-by-row oracle, and against a future that is changed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from flights.features import FEATURES
from tables import KEYS, read_days, spark_features, with_instants

DAY_START, DAY = 7 * 60, 1440

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tables():
    return read_days(month=3, first=6, last=8)


@pytest.fixture(scope="module")
def flights(tables):
    return with_instants(tables)


@pytest.fixture(scope="module")
def features(spark, tables):
    return spark_features(spark, tables)


def test_every_flight_with_an_outcome_has_one_row(features, flights):
    finished = flights[flights.arr_delay.notna()]
    assert features.index.is_unique
    assert len(features) == len(finished)
    late = (finished.set_index(KEYS).arr_delay >= 15).sort_index()
    assert (features.label == late).all()


def test_features_equal_a_row_by_row_oracle(features, flights, tables):
    finished = flights[flights.arr_delay.notna()]
    expected = pd.DataFrame(
        [
            {key: flight[key] for key in KEYS} | oracle(flight, flights, tables["weather"])
            for _, flight in finished.sample(150, random_state=1).iterrows()
        ]
    ).set_index(KEYS)
    found = features.loc[expected.index, expected.columns]
    # Spark keeps float32; a sample this large leaves none of the columns constant.
    np.testing.assert_allclose(found, expected.astype(float), rtol=1e-4, atol=1e-4)
    assert (expected.astype(float).std() > 0).all()


def test_what_happens_after_the_moment_changes_no_feature(spark, features, flights, tables):
    moment = int(np.quantile(flights.scheduled, 0.5)) - 120
    changed = change_the_future(tables, flights, moment)
    other = spark_features(spark, changed)
    names = [feature.name for feature in FEATURES]
    instants = features.index.get_level_values("scheduled") - 120
    before = features[instants <= moment].index
    pd.testing.assert_frame_equal(features.loc[before, names], other.loc[before, names])
    # And it could have: the same change reaches the flights that are predicted later.
    after = features[instants > moment].index.intersection(other.index)
    moved = (features.loc[after, names].fillna(0) != other.loc[after, names].fillna(0)).any()
    for name in (
        "origin_departure_1h_delay",
        "slack",
        "landed_delay",
        "temp",
        "dest_arrival_today_late",
    ):
        assert moved[name], name


def oracle(flight: pd.Series, flights: pd.DataFrame, weather: pd.DataFrame) -> dict[str, float]:
    """Some of one flight's features, from the definition and the whole table."""
    moment = flight.scheduled - 120
    origin = flights[flights.origin == flight.origin]
    carrier = origin[origin.carrier == flight.carrier]
    route = origin[origin.dest == flight.dest]
    dest = flights[flights.dest == flight.dest]
    same = carrier[carrier.flight == flight.flight]
    hour = flight.scheduled // 60
    return {
        "demand": (origin.scheduled // 60 == hour).sum(),
        **traffic("origin_departure_today", departures(origin, moment, None)),
        **traffic("origin_departure_1h", departures(origin, moment, 60)),
        **traffic("carrier_departure_3h", departures(carrier, moment, 180)),
        **traffic("origin_arrival_3h", arrivals(origin, moment, 180)),
        **traffic("route_arrival_today", arrivals(route, moment, None)),
        **traffic("dest_arrival_today", arrivals(dest, moment, None)),
        **traffic("number_arrival_28d", same[same.arrived <= moment].arr_delay),
        **overdue("origin", origin, moment),
        **overdue("carrier", carrier, moment),
        **aircraft(flight, flights[flights.tailnum == flight.tailnum], moment),
        **air(weather[weather.origin == flight.origin], moment),
    }


def departures(flights: pd.DataFrame, moment: int, minutes: int | None) -> pd.Series:
    return known(flights, flights.departed, moment, minutes).dep_delay


def arrivals(flights: pd.DataFrame, moment: int, minutes: int | None) -> pd.Series:
    return known(flights, flights.arrived, moment, minutes).arr_delay


def known(flights: pd.DataFrame, at: pd.Series, moment: int, minutes: int | None) -> pd.DataFrame:
    recent = at > moment - (minutes or 10**6)
    today = (at - DAY_START) // DAY == (moment - DAY_START) // DAY
    return flights[(at <= moment) & recent & today]


def traffic(name: str, delays: pd.Series) -> dict[str, float]:
    return {
        f"{name}_count": np.log1p(len(delays)),
        f"{name}_delay": delays.clip(-15, 180).sum() / (2 + len(delays)),
        f"{name}_late": (delays >= 15).sum() / (2 + len(delays)),
    }


def overdue(place: str, flights: pd.DataFrame, moment: int) -> dict[str, float]:
    today = (flights.scheduled - DAY_START) // DAY == (moment - DAY_START) // DAY
    recent = (flights.scheduled <= moment) & (flights.scheduled > moment - 180)
    waiting = flights[today & recent & ~(flights.departed <= moment)]
    return {
        f"{place}_overdue_count": np.log1p(len(waiting)),
        f"{place}_overdue_minutes": np.log1p((moment - waiting.scheduled).sum()),
    }


def aircraft(flight: pd.Series, legs: pd.DataFrame, moment: int) -> dict[str, float]:
    nothing = {"previous_leg": 0, "previous_not_left": 0, "previous_delay": 0, "slack": 480}
    due = legs[(legs.scheduled <= moment) & (legs.scheduled > flight.scheduled - 20 * 60)]
    if due.empty:
        return nothing
    previous = due.loc[due.scheduled.idxmax()]
    gone = previous.departed <= moment
    start = previous.departed if gone else max(previous.scheduled, moment)
    return {
        "previous_leg": 1,
        "previous_not_left": int(not gone),
        "previous_delay": min(previous.dep_delay, 240) if gone else 0,
        "slack": np.clip(flight.scheduled - start - 2 * previous.block, -240, 480),
    }


def air(weather: pd.DataFrame, moment: int) -> dict[str, float]:
    start = pd.to_datetime(weather.time_hour).map(lambda instant: instant.timestamp()) / 60
    over = weather[start + 60 <= moment].iloc[-3:]
    if over.empty:
        return {"temp": np.nan, "rain": np.nan, "visib_3h": np.nan}
    return {
        "temp": over.temp.iloc[-1],
        "rain": np.log1p(100 * over.precip.iloc[-1]),
        "visib_3h": over.visib.min(),
    }


def change_the_future(
    tables: dict[str, pd.DataFrame], flights: pd.DataFrame, moment: int
) -> dict[str, pd.DataFrame]:
    """Other outcomes and other weather for everything that is not known at the moment."""
    random = np.random.default_rng(3)
    changed = tables["flights"].copy()
    n = len(changed)
    to_depart = ~(flights.departed <= moment)
    to_arrive = ~(flights.arrived <= moment)
    # Any delay after which the event still lies after the moment could have been.
    dep_delay = np.maximum(moment + 1 - flights.scheduled, -20) + random.integers(0, 200, n)
    earliest = moment + 1 - flights.scheduled - flights.block
    arr_delay = np.maximum(earliest, -40) + random.integers(0, 200, n)
    # Later flights may be cancelled; those to predict keep an outcome, or they would have no row.
    gone = (flights.scheduled - 120 > moment) & (random.random(n) < 0.1)
    changed["dep_delay"] = changed.dep_delay.mask(to_depart, dep_delay).mask(gone)
    changed["arr_delay"] = changed.arr_delay.mask(to_arrive, arr_delay).mask(gone)
    unfinished = flights.arr_delay.isna() & (flights.scheduled - 120 <= moment)
    changed.loc[unfinished, "arr_delay"] = np.nan
    weather = tables["weather"].copy()
    start = pd.to_datetime(weather.time_hour).map(lambda instant: instant.timestamp()) / 60
    columns = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
    later = start + 60 > moment
    weather.loc[later, columns] = random.uniform(0, 50, (later.sum(), len(columns)))
    return {**tables, "flights": changed, "weather": weather}
