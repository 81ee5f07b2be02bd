"""Time of one averaging round over encrypted connections, against one without.

Two workers contribute float32 parameters and receive their average; rounds are interleaved. The
difference is the price of ``tls=True``; the bound is there to notice when it rises.
"""

import averager_rounds
import harness

WORKERS = 2
SIZES = (25_000_000, 10_000)
BOUND = 4.0


def main() -> None:
    """Measures both sizes and reports."""
    chosen = harness.arguments(__doc__, repeats=15, quick_repeats=5)
    medians = {numel: measure(numel, chosen.repeats) for numel in SIZES}
    claims = [
        harness.Claim(
            name=f"encrypted round / plain round, {numel:,} parameters",
            ratio=times["encrypted"] / times["plain"],
            target=BOUND,
        )
        for numel, times in medians.items()
    ]
    harness.report("tls_round", claims, {"median_seconds": medians})


def measure(numel: int, repeats: int) -> dict[str, float]:
    """Returns the median seconds of a round, by contender."""
    with (
        averager_rounds.rounds(WORKERS, numel) as plain,
        averager_rounds.rounds(WORKERS, numel, tls=True) as encrypted,
    ):
        turns = {"plain": plain.round, "encrypted": encrypted.round}
        seconds = harness.interleave(turns, repeats=repeats, warmups=2)
    return {
        name: harness.show(f"{name}, {numel:,} parameters", each) for name, each in seconds.items()
    }


if __name__ == "__main__":
    main()
