"""A round that starts over while a contribution is on its way into the sum."""

from __future__ import annotations

import torch
from crew import WAIT_S, crew, eventually, window

from sparkdl.averager.messages.headers import window_header
from sparkdl.transport.framing import octets_of, values_prefix


def test_what_is_on_its_way_into_a_sum_that_is_forgotten_goes_nowhere() -> None:
    with crew(2, max_failures=5) as workers:
        for segment in workers.averager._center._spare:
            segment.fill_(float("nan"))  # what lies there is nobody's contribution
        octets = bytes(octets_of(torch.full((3,), 7.0)))
        for rank in (0, 1):
            channel = workers.client(rank)._channel
            channel.send_header(window_header(window(rank)))
            channel._connection._send(bytes(values_prefix(len(octets))) + octets[:5])
        entered = workers.averager._coordinator.round.entered
        assert eventually(lambda: len(entered) == 2)
        workers.client(1)._channel.close()
        first = workers.client(0)._channel
        assert first.receive_header() == {"again": True}
        first._connection._send(octets[5:])
        assert workers.exchange(window(0), 7.0).result(WAIT_S) == [7.0] * 3
