"""What the driver keeps of a model that it only tries out."""

from __future__ import annotations

import gc
import weakref

from frames import CLASSES, WIDTH, estimator, frame
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.estimator.preflight import Preflight
from sparkdl.feed.facts import ColumnFacts, DataFacts


def test_the_replica_that_was_tried_out_is_gone_before_training(spark: SparkSession) -> None:
    built: list[weakref.ref[nn.Module]] = []

    class Tried(Preflight):
        def check(self, facts: DataFacts) -> None:
            built.append(weakref.ref(self._replica.module))
            super().check(facts)

    ready = Tried(estimator(), frame(spark, partitions=2))
    features = ColumnFacts(shortest=WIDTH, longest=WIDTH)
    label = ColumnFacts(smallest=0, largest=CLASSES - 1)
    ready.check(DataFacts((30, 30), (features, label)))

    gc.collect()
    assert built[0]() is None
