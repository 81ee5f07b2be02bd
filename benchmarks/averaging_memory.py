"""The driver's peak memory over its baseline while it averages, with 2, 4 and 8 workers.

The averager runs in this process; the workers, which are not counted, run in their own. The
baseline is taken just before the averager is made, the peak (VmHWM) after the last round.

With ``--connect`` a client of Spark Connect fits 100 M parameters instead, in a process of its own:
its peak, and that of the process beside rank 0 which averages, over those of a small fit.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

import averager_rounds
import harness

PARAMETERS = 25_000_000
PARAMETER_BYTES = 4 * PARAMETERS
WORLD_SIZES = (2, 4, 8)
FLAT = 0.25
"""How much the peak may grow from the fewest to the most workers, as a fraction of P."""
WIDTH, LAYERS = 1448, 48
"""Of a client's model, square layers of 8.4 MB: 100.6 M parameters."""


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--connect", action="store_true", help="Spark Connect, and nothing else")
    chosen = harness.parse(options, repeats=5, quick_repeats=2)
    if chosen.connect:
        at_client(6 if chosen.quick else LAYERS)
        return
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


def at_client(layers: int) -> None:
    """Measures a client's fit and the process that averages for it, and reports."""
    parameter_bytes = 4 * layers * WIDTH * (WIDTH + 1)
    peaks = harness.run_child([sys.executable, harness.FOLDER / "fit_at_client.py", str(layers)])
    print(f"P = {parameter_bytes / 1e6:.0f} MB: {peaks}")
    claims = [
        harness.Claim(name=f"peak of {name} / P", ratio=peaks[key] / parameter_bytes, target=3.0)
        for name, key in (("the client", "client"), ("what serves beside rank 0", "serving"))
    ]
    detail = {"parameter_bytes": parameter_bytes, "peak_bytes_over_a_small_fit": peaks}
    harness.report("averaging_memory", claims, detail)


def status_bytes(field: str, process: int | None = None) -> int:
    """Returns a memory figure of a process, this one by default, in bytes."""
    status = Path(f"/proc/{process or os.getpid()}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status} has no {field}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
