"""The table that the job reads: every flight with its features, prepared for the models."""

import time
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flights.data import find_data_folder, read_tables
from flights.features import CATEGORIES, FEATURES, build_features
from flights.preparation import Preparation, Split
from sparkdl.errors import ConfigError
from sparkdl.jobs import Source
from sparkdl.jobs.logs import say


class Flights(Source):
    """Every 2013 flight from New York.

    Its rows have ``numeric`` (array<float>, standardised, 0 where unknown), an int column for each
    of carrier, origin and dest, ``label`` (1.0 if late), and ``part``: ``train`` or ``test``.

    Args:
        train_months: first and last month to learn from, also means, scales and vocabularies.
        test_months: first and last month to predict; all after the training months.
        vocabulary_sizes: for how many values of carrier, origin and dest the network has room.
    """

    def __init__(
        self,
        train_months: tuple[int, int] = (1, 10),
        test_months: tuple[int, int] = (11, 12),
        vocabulary_sizes: Sequence[int] = (16, 3, 104),
    ) -> None:
        self.split = Split(train_months=train_months, test_months=test_months)
        self.vocabulary_sizes = tuple(vocabulary_sizes)

    def read(self, spark: SparkSession) -> DataFrame:
        """Called by the job.

        Raises:
            SetupError: the data are not installed.
            ConfigError: there are more values than room.
        """
        find_data_folder()
        started = time.perf_counter()
        raw = build_features(read_tables(spark)).persist()
        say(f"{len(FEATURES)} features of {raw.count():,} flights", started)
        started = time.perf_counter()
        preparation = Preparation.learn(self.split.train(raw))
        require_room(self.vocabulary_sizes, preparation)
        flights = preparation.apply(raw)
        part = F.when(self.split.is_train(), "train").when(self.split.is_test(), "test")
        flights = flights.withColumn("part", part).where("part is not null").persist()
        train, test = (flights.where(F.col("part") == each).count() for each in ("train", "test"))
        raw.unpersist()
        say(f"prepared: {train:,} flights to learn from, {test:,} to predict", started)
        return flights


def require_room(room: Sequence[int], preparation: Preparation) -> None:
    """Check that the network's embeddings have a row for every value seen in training.

    Args:
        room: for how many values of each category.
        preparation: what was learnt from the training part.

    Raises:
        ConfigError: a vocabulary is larger than its embedding; the message has the right sizes.
    """
    seen = [len(preparation.vocabularies[category]) for category in CATEGORIES]
    if any(values > rows for values, rows in zip(seen, room, strict=True)):
        raise ConfigError(
            f"the training months have {seen} values of {', '.join(CATEGORIES)}, but the network "
            f"has room for {list(room)}: --source.init_args.vocabulary_sizes '{seen}' "
            f"--estimator.model.init_args.vocabulary_sizes '{seen}'"
        )
