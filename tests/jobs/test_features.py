"""The features do not depend on a future that is changed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from flights.features import FEATURES
from tables import KEYS, read_days, spark_features, with_instants

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
    reached = ["origin_departure_1h_delay", "slack", "landed_delay", "temp"]
    assert moved[[*reached, "dest_arrival_today_late"]].all()


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
