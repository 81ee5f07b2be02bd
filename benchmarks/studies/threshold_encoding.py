"""How fast threshold encoding is on one core, against copying the same memory with numpy and torch.

A turn takes what a worker has trained, 25 M float32 parameters, and does everything that is done to
them before they are sent: the change, the residual, the threshold, the message. What counts is
processor time, so that a busy machine does not matter.
"""

import time
from collections.abc import Callable

import harness
import numpy as np
import torch

from sparkdl.averager.values.packing import MAX_CHUNK_BYTES
from sparkdl.averager.values.sparse import Sparse
from sparkdl.strategies.threshold.threshold_encoding import Encoding, ThresholdEncoder

PARAMETERS = 25_000_000
BYTES = 4 * PARAMETERS
PARTS = {1e-4: 1.0, 1e-3: 1.0, 1e-2: 1.0, 0.1: 0.6}
"""Fractions of entries that are sent, with the GB/s to reach; the last is sent as bits, like only
shake-up messages and the first messages with a threshold far too low."""


def main() -> None:
    """Measures each fraction of the entries, and both copies, in turn."""
    chosen = harness.arguments(__doc__, repeats=9, quick_repeats=3)
    torch.set_num_threads(1)
    source = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(source)
    turns: dict[str, Callable[[], float]] = {
        "numpy copy": lambda: seconds(lambda: np.copyto(target.numpy(), source.numpy())),
        "torch copy": lambda: seconds(lambda: target.copy_(source)),
    }
    turns |= {f"encoding, {part:g} sent": encoding(source, part) for part in PARTS}
    times = harness.interleave(turns, repeats=chosen.repeats, warmups=1)
    gb_s = {name: BYTES / harness.show(name, each) / 1e9 for name, each in times.items()}
    claims = [
        harness.Claim(
            name=f"{name}: GB/s of float32 on one core",
            ratio=gb_s[name],
            target=target,
            at_least=True,
        )
        for part, target in PARTS.items()
        for name in [f"encoding, {part:g} sent"]
    ]
    harness.report("threshold_encoding", claims, {"gb_s": gb_s})


def encoding(source: torch.Tensor, part: float) -> Callable[[], float]:
    """Returns a turn that encodes changes with the given fraction above the threshold."""
    threshold = float(source[:1_000_000].abs().quantile(1 - part))
    encoder = ThresholdEncoder(Encoding(threshold, None, None, None), [source])
    center, share = torch.zeros_like(source), torch.empty_like(source)
    packing, step = Sparse(source.dtype), MAX_CHUNK_BYTES // 4

    def turn() -> float:
        encoder.residuals[0].zero_()  # so that each message is like the first
        return seconds(work)

    def work() -> None:
        encoder.encode([source], [center], [share])
        for stretch in share.split(step):
            packing.pack(stretch)

    return turn


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
