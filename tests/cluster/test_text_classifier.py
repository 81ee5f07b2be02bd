"""Texts to classes, as docs/sequences.md shows it: pyspark.ml's words, a transformer, no padding.

Whether a text is for or against something is said by one word, and turned round by a "not" before
it; around it stand words that mean nothing, in a log-normal number.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml.feature import CountVectorizer, Tokenizer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

import sparkdl
from sparkdl import ParameterAveraging, TorchEstimator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FILLERS = [f"word{number}" for number in range(40)]


class Classifier(nn.Module):
    """A transformer over a row's words; where it stands, each word is added its neighbour."""

    def __init__(self, words: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.neighbours = nn.Conv1d(width, width, 3, padding=1)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        real = (~padding_mask)[..., None]
        words = self.embedding(tokens)
        words = (words + self.neighbours(words.mT).mT.relu()) * real
        encoded = self.encoder(words, src_key_padding_mask=padding_mask)
        answers: Tensor = self.out((encoded * real).sum(1) / real.sum(1).clamp(min=1))
        return answers


def texts(count: int, seed: int) -> list[tuple[int, str, int]]:
    """(id, text, whether it is for it)."""
    drawn = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(np.clip(drawn.lognormal(np.log(6), 0.6), 1, 40))
        words = list(drawn.choice(FILLERS, length))
        good, negated = drawn.integers(0, 2, 2)
        place = int(drawn.integers(0, length + 1))
        words[place:place] = ["not"] * negated + [("bad", "good")[good]]
        rows.append((number, " ".join(words), int(good ^ negated)))
    return rows


def tokens_of(frame: DataFrame, vocabulary: list[str]) -> DataFrame:
    words = Tokenizer(inputCol="text", outputCol="words").transform(frame)
    ids = F.map_from_arrays(F.lit(vocabulary), F.lit(list(range(2, len(vocabulary) + 2))))
    return words.withColumn("tokens", F.transform("words", lambda w: F.coalesce(ids[w], F.lit(1))))


def count_steps(batch_size: int) -> list[Any]:
    """What a training function of one's own sees: the shapes of its minibatches, and their ids."""
    worker = sparkdl.current_worker()
    return [
        (tuple(batch["tokens"].shape), batch["lengths"].tolist(), batch["id"].tolist())
        for batch in worker.batches(batch_size)
    ]


@pytest.mark.slow
def test_a_text_classifier_learns_what_not_means(spark: SparkSession) -> None:
    schema = "id int, text string, label int"
    trained = spark.createDataFrame(texts(1600, 1), schema).repartition(2)
    held_back = spark.createDataFrame(texts(400, 2), schema)
    words = Tokenizer(inputCol="text", outputCol="words").transform(trained)
    vocabulary = CountVectorizer(inputCol="words", minDF=2).fit(words).vocabulary
    assert {"not", "good", "bad"} <= set(vocabulary)
    estimator = TorchEstimator(
        model=partial(Classifier, len(vocabulary) + 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        strategy=ParameterAveraging(period=5),
        featuresCol="tokens",
        padCols={"tokens": 0},
        groupByLength=True,
        epochs=4,
        batchSize=32,
        numWorkers=2,
        seed=1,
        progress=False,
    )
    model = estimator.fit(tokens_of(trained, vocabulary))
    predicted = model.transform(tokens_of(held_back, vocabulary))
    right = predicted.where(F.col("prediction") == F.col("label")).count()
    # A model that does not see "not" is right in half of the rows.
    assert right > 0.9 * 400


@pytest.mark.slow
def test_a_loop_of_ones_own_is_given_padded_rows_and_their_lengths(spark: SparkSession) -> None:
    count, vocabulary = 61, [*FILLERS, "not", "good", "bad"]
    rows = texts(count, 3)
    frame = spark.createDataFrame(rows, "id int, text string, label int").repartition(3)
    seen = sparkdl.run(
        count_steps,
        7,
        num_workers=2,
        device="cpu",
        df=tokens_of(frame, vocabulary).select("id", "tokens"),
        padCols={"tokens": 0},
        padInputs={"tokens": "lengths"},
        groupByLength=True,
    )
    lengths = {number: len(text.split()) for number, text, _ in rows}
    assert len(seen[0]) == len(seen[1])
    ids = []
    for shape, counted, numbers in [minibatch for worker in seen for minibatch in worker]:
        assert counted == [lengths[number] for number in numbers]
        assert shape == (len(numbers), max(counted))
        ids += numbers
    assert sorted(ids) == list(range(count))
