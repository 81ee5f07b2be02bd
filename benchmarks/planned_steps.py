"""Memory and seconds of steps, and minibatches, that are predicted / measured, in one process.

Memory is the most that torch's allocator has given out in a step, by its profiler. What a process
has resident may be more, as the C library keeps what is given back. Seconds are the processor's,
with one thread, as they are the same whoever else uses it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from torch import Tensor, nn

sys.path.append(str(harness.FOLDER.parent / "tests" / "planner" / "step"))
from step_networks import Residual, Transformer, mlp, most_allocated

from sparkdl import Batch
from sparkdl.planner.step import layers
from sparkdl.planner.step.batch import choose_batch, learning_rate
from sparkdl.planner.step.blocks import BlockPlan, plan_blocks
from sparkdl.planner.step.memory import rows_of, step_memory
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.gradient_noise import GradientNoise, noise_scale

ADAM = torch.optim.Adam
LOSS = nn.CrossEntropyLoss()
OFF, PLAN_OFF, TIMES = 0.1, 0.15, 1.1
SHARES = (1.5, 0.8, 0.65)
"""Of the memory of a step that keeps all, as budgets."""
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
TARGET, SEEDS, LIMIT = 0.95, 3, 5000


def convolutions() -> nn.Module:
    blocks = [Residual(32) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *blocks, nn.Flatten(), nn.Linear(32 * 900, 10))


def _example(features: Tensor, targets: Tensor) -> Batch:
    return Batch((features,), targets, last=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, int]] = {
    "MLP": (partial(mlp, 6, 512), _example(torch.randn(8, 512), torch.arange(8)), 4096),
    "CNN": (convolutions, _example(torch.randn(8, 3, 32, 32), torch.arange(8)), 32),
    "transformer": (
        partial(Transformer, 4000, 128, 512, 4),
        _example(torch.randint(4000, (8, 64)), torch.randint(4000, (8, 64))),
        12,
    ),
}


def allocated(name: str, plan: BlockPlan | None) -> int:
    """The most bytes of two steps, everything included."""
    build, example, rows = MODELS[name]

    def work() -> None:
        replica = _replica(build, plan)
        for _ in range(2):
            replica.step(rows_of(example, rows))

    return most_allocated(work)


def seconds(name: str, plan: BlockPlan) -> float:
    """Of a step: the median of five."""
    build, example, rows = MODELS[name]
    replica, batch = _replica(build, plan), rows_of(example, rows)
    return layers.seconds_of(lambda: replica.step(batch), replica.device, repeats=5)


def _replica(build: Callable[[], nn.Module], plan: BlockPlan | None) -> Replica:
    module = build().train()
    return Replica(module if plan is None else plan.apply(module), ADAM, LOSS)


def _memory() -> dict[str, float]:
    found = {}
    for name, (build, example, rows) in MODELS.items():
        peak = step_memory(build(), example, optimizer=ADAM, loss=LOSS).peak(rows)
        found[name] = peak / allocated(name, None)
        print(
            f"{name}, {rows:,} rows: {peak / 2**20:.0f} MiB, predicted / measured "
            f"{found[name]:.3f}",
            flush=True,
        )
    return found


def _plans(quick: bool) -> dict[str, tuple[float, float]]:
    found = {}
    for name in ("CNN", "transformer"):
        build, example, rows = MODELS[name]
        keeps = step_memory(build(), example, optimizer=ADAM, loss=LOSS).peak(rows)
        for share in SHARES[:1] if quick else SHARES:
            plan = plan_blocks(
                build(),
                example,
                batch_size=rows,
                budget=int(share * keeps),
                optimizer=ADAM,
                loss=LOSS,
            )
            recomputed = sum(each.name.startswith("recompute") for each in plan.blocks.values())
            ratios = plan.memory / allocated(name, plan), plan.seconds / seconds(name, plan)
            found[f"{name}, {share:g} of the memory"] = ratios
            print(
                f"{name} in {share:g} of the memory: {recomputed} of {len(plan.blocks)} blocks "
                f"recompute, predicted / measured: memory {ratios[0]:.3f}, time {ratios[1]:.3f}",
                flush=True,
            )
    return found


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data / 16).float()[order], torch.tensor(digits.target)[order]


class Digits:
    """A perceptron that learns scikit-learn's digits; 360 of them are held out."""

    def __init__(self) -> None:
        features, labels = _digits()
        self.test, self.train = (features[:360], labels[:360]), (features[360:], labels[360:])

    def _model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def steps(self, rows: int, rate: float, seed: int, noise: GradientNoise | None = None) -> int:
        """Steps until 95 % of those held out are right."""
        features, labels = self.train
        model, generator = self._model(seed), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        done = 0
        while done < LIMIT:
            order = torch.randperm(len(features), generator=generator)
            for chosen in order.split(rows)[: len(order) // rows]:
                if noise is not None:
                    half = self._square(model, chosen[: rows // 2])
                    noise.add(half, 2 / rows, self._square(model, chosen), rows)
                optimizer.zero_grad()
                LOSS(model(features[chosen]), labels[chosen]).backward()
                optimizer.step()
                done += 1
                if done % max(1, 320 // rows) == 0 and self._right(model) >= TARGET:
                    return done
        return done

    def _square(self, model: nn.Module, chosen: Tensor) -> float:
        model.zero_grad()
        LOSS(model(self.train[0][chosen]), self.train[1][chosen]).backward()
        return sum(float(each.grad.square().sum()) for each in model.parameters())

    @torch.no_grad()
    def _right(self, model: nn.Module) -> float:
        features, labels = self.test
        return float((model(features).argmax(1) == labels).float().mean())

    def seconds(self, rows: int) -> float:
        """A step."""
        model = self._model(0)
        replica = Replica(model, partial(torch.optim.SGD, lr=0.1), LOSS)
        batch = _example(self.train[0][:rows], self.train[1][:rows])
        found = []
        for _ in range(60):
            begin = time.process_time()
            replica.step(batch)
            found.append(time.process_time() - begin)
        return statistics.median(found)


def _batches() -> tuple[float, dict[str, Any]]:
    """Seconds to the target with the chosen minibatch / with the best of all, and the table."""
    digits, base, rate, noise = Digits(), 32, 0.3, GradientNoise(0.999)
    for seed in range(SEEDS):
        digits.steps(base, rate, seed, noise)
    assert noise.means is not None
    scale = noise_scale(*noise.means)
    step_s = {rows: digits.seconds(rows) for rows in SIZES}
    chosen = choose_batch(step_s, noise_scale=scale).batch_size
    measured = {}
    for rows in SIZES:
        scaled = learning_rate(rate, rows=base, to_rows=rows, noise_scale=scale)
        steps = statistics.mean(digits.steps(rows, scaled, seed) for seed in range(SEEDS))
        measured[rows] = steps * step_s[rows]
        print(f"{rows} rows: {steps:.0f} steps, {1e3 * measured[rows]:.1f} ms", flush=True)
    print(f"noise scale {scale:.1f} rows, chosen: {chosen}", flush=True)
    return measured[chosen] / min(measured.values()), {
        "noise_scale": scale,
        "chosen": chosen,
        "milliseconds_to_95_percent": {n: round(1e3 * s, 2) for n, s in measured.items()},
    }


def measure(*, quick: bool) -> None:
    """Measures everything, and reports.

    Args:
        quick: one budget, to see that it works.
    """
    torch.set_num_threads(1)
    layers.perf_counter = time.process_time
    memory, plans = _memory(), _plans(quick)
    times, batches = _batches()
    by_memory, by_time = zip(*plans.values(), strict=True)
    harness.report(
        "planning_steps",
        [
            harness.Claim(
                name=f"peak memory of an MLP, a CNN and a transformer: largest |predicted / "
                f"measured - 1| / {OFF}",
                ratio=max(abs(each - 1) for each in memory.values()) / OFF,
                target=1,
            ),
            harness.Claim(
                name=f"memory of plans by block: largest |predicted / measured - 1| / {PLAN_OFF}",
                ratio=max(abs(each - 1) for each in by_memory) / PLAN_OFF,
                target=1,
            ),
            harness.Claim(
                name=f"time of plans by block: largest |predicted / measured - 1| / {PLAN_OFF}",
                ratio=max(abs(each - 1) for each in by_time) / PLAN_OFF,
                target=1,
            ),
            harness.Claim(
                name="digits to 95 %: seconds with the chosen minibatch / with the best of nine",
                ratio=times,
                target=TIMES,
            ),
        ],
        {
            "memory": {name: round(each, 3) for name, each in memory.items()},
            "plans": {name: [round(e, 3) for e in each] for name, each in plans.items()},
            **batches,
        },
    )


if __name__ == "__main__":
    measure(quick=harness.arguments(__doc__, repeats=1).quick)
