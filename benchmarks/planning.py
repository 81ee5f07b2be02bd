"""What is predicted before a training / what is measured then, part by part.

``--part`` chooses one: ``hosts`` predicts steps with 4 and 8 workers from fits with 1 and 2,
``advice`` holds what a plan puts first to what is fastest, ``steps`` predicts the memory of a step,
its minibatch, and what recomputing activations costs, ``simulation`` epochs with ten strategies.
"""

import advised_hosts
import harness
import planned_hosts
import planned_steps
import simulated_hosts

PARTS = {
    "hosts": planned_hosts.measure,
    "advice": advised_hosts.measure,
    "steps": planned_steps.measure,
    "simulation": simulated_hosts.measure,
}


def main() -> None:
    """Measures the parts that were asked for, one after another."""
    options = harness.parser(__doc__)
    options.add_argument("--part", choices=PARTS, action="append", help="all by default")
    chosen = harness.parse(options, repeats=1)
    for name in chosen.part or PARTS:
        PARTS[name](quick=chosen.quick)


if __name__ == "__main__":
    main()
