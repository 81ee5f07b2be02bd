"""The driver's peak memory over its baseline while it averages, with 2, 4 and 8 workers.

The averager runs in this process; the workers, which are not counted, run in their own. The
baseline is taken just before the averager is made, the peak (VmHWM) after the last round.
"""

import ctypes
import gc
from pathlib import Path

import averager_rounds
import harness

PARAMETERS = 25_000_000
PARAMETER_BYTES = 4 * PARAMETERS
WORLD_SIZES = (2, 4, 8)
FLAT = 0.25
"""How much the peak may grow from the fewest to the most workers, as a fraction of P."""


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=5, quick_repeats=2)
    print(f"P = {PARAMETER_BYTES / 1e6:.0f} MB of parameters; {chosen.repeats} rounds each")
    peak_bytes(2, rounds=1, numel=1_000_000)  # the libraries' first use belongs to the baseline
    peaks = {}
    for workers in WORLD_SIZES:
        peaks[workers] = peak_bytes(workers, rounds=chosen.repeats, numel=PARAMETERS)
        print(
            f"{workers} workers: peak {peaks[workers] / 1e6:.1f} MB over the baseline",
            flush=True,
        )
    growth = (peaks[WORLD_SIZES[-1]] - peaks[WORLD_SIZES[0]]) / PARAMETER_BYTES
    claims = [
        harness.Claim(
            name="highest peak / P",
            ratio=max(peaks.values()) / PARAMETER_BYTES,
            target=3.0,
        ),
        harness.Claim(name="(peak with 8 - peak with 2 workers) / P", ratio=growth, target=FLAT),
    ]
    detail = {"parameter_bytes": PARAMETER_BYTES, "peak_bytes_over_baseline": peaks}
    harness.report("averaging_memory", claims, detail)


def peak_bytes(workers: int, *, rounds: int, numel: int) -> int:
    """Returns this process's peak resident memory over its baseline while it averages, in bytes.

    Args:
        workers: number of worker processes.
        rounds: rounds to run.
        numel: number of float32 parameters.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory left by an earlier turn must not be reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    baseline = status_bytes("VmRSS")
    with averager_rounds.rounds(workers, numel) as processes:
        for _ in range(rounds):
            processes.round()
        return status_bytes("VmHWM") - baseline


def status_bytes(field: str) -> int:
    """Returns a memory figure of this process from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
