"""The network without Spark."""

from __future__ import annotations

import torch
from flights.network import DelayNetwork


def test_one_logit_a_flight_and_every_index_of_the_vocabulary_has_a_row():
    network = DelayNetwork(5, [16, 3, 104])
    numeric = torch.zeros(2, 5)
    first, last = torch.tensor([0, 16]), torch.tensor([0, 3])
    assert network(numeric, first, last, torch.tensor([0, 104])).shape == (2, 1)


def test_each_category_changes_the_output():
    network = DelayNetwork(5, [2, 2, 2]).eval()
    numeric, zero, one = torch.zeros(1, 5), torch.tensor([0]), torch.tensor([1])
    base = network(numeric, zero, zero, zero)
    for changed in ([one, zero, zero], [zero, one, zero], [zero, zero, one]):
        assert network(numeric, *changed) != base
