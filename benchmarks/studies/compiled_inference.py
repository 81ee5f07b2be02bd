"""How much torch.compile and torch.export speed up the models of ``inference.py``.

Seconds of processor time per row with one thread, in this process: for the model as it is, compiled
for batches of any size as ``predictCompiled`` does it, and as a torch.export program. Ratios are
those of the fastest turns; above 1 the compiled model is the faster one.
"""

import os
import time
from collections.abc import Callable

import harness
import numpy as np
import torch
from inference_models import CASES, Case
from torch import Tensor, nn

BATCH_ROWS = 1024
BATCHES = {"mlp": 20, "cnn": 4, "transformer": 2}
AS_IT_IS, COMPILED, EXPORTED = "as it is", "compiled", "exported"


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=8, quick_repeats=2)
    torch.set_num_threads(1)
    claims: list[harness.Claim] = []
    found: dict[str, dict[str, float]] = {}
    for name, case in CASES.items():
        rows = drawn(case)
        ways, first_s = ways_of(case, rows)
        turns = {way: turn(run, rows, BATCHES[name]) for way, run in ways.items()}
        runs = harness.interleave(turns, repeats=chosen.repeats, warmups=1)
        for way, each in runs.items():
            harness.show(f"{name}, {way}", each, unit="us of processor time a row", digits=2)
        least = {way: min(each) for way, each in runs.items()}
        found[name] = {**least, "first compiled batch, s of processor time": first_s}
        print(f"{name}, the first compiled batch: {first_s:.1f} s of processor time", flush=True)
        claims += [
            harness.Claim(
                name=f"{name}: {AS_IT_IS} / {way}",
                ratio=least[AS_IT_IS] / least[way],
                target=1.0,
                at_least=True,
            )
            for way in (COMPILED, EXPORTED)
        ]
    harness.report("compiled_inference", claims, {"microseconds": found})


def drawn(case: Case) -> Tensor:
    """Returns one batch of rows in the model's input format."""
    draws = np.random.default_rng(7)
    if case.image:
        return torch.from_numpy(draws.integers(0, 255, (BATCH_ROWS, *case.shape), dtype=np.uint8))
    return torch.from_numpy(case.draw(draws, BATCH_ROWS))


def ways_of(case: Case, rows: Tensor) -> tuple[dict[str, nn.Module], float]:
    """Returns the model in each form, and the seconds that compiling it took."""
    compiled, exported = case.build().eval(), case.build().eval()
    compiled.compile(dynamic=True)
    began = processor_s(children=True)
    with torch.no_grad():
        compiled(rows)
    took = processor_s(children=True) - began
    sizes = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(exported, (rows,), dynamic_shapes=sizes)
    ways = {AS_IT_IS: case.build().eval(), COMPILED: compiled, EXPORTED: program.module()}
    return ways, took


def turn(run: nn.Module, rows: Tensor, batches: int) -> Callable[[], float]:
    """Returns a measurement: microseconds of processor time per row."""

    def measured() -> float:
        began = processor_s()
        with torch.no_grad():
            for _ in range(batches):
                run(rows)
        return (processor_s() - began) / (batches * len(rows)) * 1e6

    return measured


def processor_s(*, children: bool = False) -> float:
    """Returns the processor seconds used so far, optionally including those of ended children."""
    if not children:
        return time.process_time()
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


if __name__ == "__main__":
    main()
