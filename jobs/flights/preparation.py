"""From features to what the models read: split by time, standardise, index the categories."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flights.features import CATEGORIES, FEATURES

LARGEST_SCORE = 5.0
"""Standardised values are cut here: a few delays of 20 hours should not steer a network."""

DIGITS = 6
"""Of means and scales. Spark adds partial sums in the order of their arrival, so that last digits
differ from run to run, and with them now and then a feature and every later bit of a training."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Training and test part by the month of scheduled departure, never at random.

    Args:
        train_months: first and last month to learn from.
        test_months: first and last month to predict; all after the training months.
    """

    train_months: tuple[int, int] = (1, 10)
    test_months: tuple[int, int] = (11, 12)

    def __post_init__(self) -> None:
        first, last = self.train_months
        test_first, test_last = self.test_months
        if not 1 <= first <= last < test_first <= test_last <= 12:
            raise ValueError(
                f"train_months {list(self.train_months)} and test_months {list(self.test_months)} "
                "must each be [first, last] within 1..12, and every test month after training"
            )

    def train(self, flights: DataFrame) -> DataFrame:
        """The flights to learn from."""
        return flights.where(self.is_train())

    def test(self, flights: DataFrame) -> DataFrame:
        """The flights to predict."""
        return flights.where(self.is_test())

    def is_train(self) -> Column:
        """Whether a flight is to be learnt from."""
        return F.col("month").between(*self.train_months)

    def is_test(self) -> Column:
        """Whether a flight is to be predicted."""
        return F.col("month").between(*self.test_months)


@dataclass(frozen=True)
class Preparation:
    """What was learnt from the training part about the features themselves."""

    means: tuple[float, ...]
    """Of each of ``FEATURES`` where it is known."""
    scales: tuple[float, ...]
    """Standard deviations; 1 where a feature does not vary."""
    vocabularies: dict[str, tuple[str, ...]]
    """Category -> its values in order; the index of the first is 1, and 0 is any other value."""

    @classmethod
    def learn(cls, train: DataFrame) -> "Preparation":
        """Take means, scales and vocabularies from the training part.

        Args:
            train: features as ``build_features`` makes them.

        Raises:
            ValueError: there are no flights to learn from.
        """
        # A tenth of the flights gives the moments to within a percent, in a tenth of the time.
        tenth = train.where(F.pmod(F.xxhash64("scheduled", "carrier", "flight"), F.lit(10)) == 0)
        moments = (
            tenth.select(F.posexplode("known").alias("position", "value"))
            .groupBy("position")
            .agg(F.avg("value").alias("mean"), F.stddev("value").alias("scale"))
        )
        found = {row["position"]: row for row in moments.collect()}
        values = train.agg(*(F.sort_array(F.collect_set(c)).alias(c) for c in CATEGORIES)).first()
        if not found or values is None:
            raise ValueError("the training months have too few flights: widen split.train_months")
        return cls(
            tuple(_rounded(found[place]["mean"] or 0.0) for place in range(len(FEATURES))),
            tuple(_rounded(found[place]["scale"] or 1.0) for place in range(len(FEATURES))),
            {category: tuple(values[category]) for category in CATEGORIES},
        )

    def apply(self, flights: DataFrame) -> DataFrame:
        """Make the models' columns.

        Args:
            flights: features as ``build_features`` makes them.

        Returns:
            ``numeric`` (array<float>, standardised, 0 where unknown), an int column for each
            category, ``label`` and ``month``.
        """
        numeric = F.array(*map(self._standardise, range(len(FEATURES)))).alias("numeric")
        return flights.select(numeric, *map(self._index, CATEGORIES), "label", "month")

    def _standardise(self, position: int) -> Column:
        score = (F.get("known", F.lit(position)) - self.means[position]) / self.scales[position]
        # Filled first: to least and greatest a null is no value, not an unknown one.
        filled = F.coalesce(score, F.lit(0.0))
        cut = F.greatest(F.least(filled, F.lit(LARGEST_SCORE)), F.lit(-LARGEST_SCORE))
        return cut.cast("float")

    def _index(self, category: str) -> Column:
        known = F.array(*map(F.lit, self.vocabularies[category]))
        return F.array_position(known, F.col(category)).cast("int").alias(category)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
