"""The networks, machines and speed-ups of Das et al. 2016, as far as they are known to us.

Only the speed-ups, nodes and minibatches are of the paper's abstract and of notes on it. Layers are
those of the networks' own papers; the links and images a second of one node, by which its
operations a second are known, are from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import Layer, best_exchange, step

MESSAGE_S = 25e-6
"""Fitted to all five: what a message costs the processor of a node, which is not known."""
FRAMES = 512
"""Fitted, of the powers of two: the minibatch of the network of speech, which is not known."""


def convolution(inputs: int, outputs: int, kernel: int, width: int, input_width: int) -> Layer:
    weights = inputs * outputs * kernel**2
    flop = 2 * weights * width**2
    name = f"convolution {inputs}-{outputs}"
    size = 4 * inputs * input_width**2
    return Layer(name, "Conv2d", 3 * flop, 2 * flop, 4 * weights, size, False)


def full(inputs: int, outputs: int) -> Layer:
    weights = inputs * outputs
    name = f"full {inputs}-{outputs}"
    return Layer(name, "Linear", 6 * weights, 4 * weights, 4 * weights, 4 * inputs, True)


VGG_A = [
    convolution(3, 64, 3, 224, 224),
    convolution(64, 128, 3, 112, 112),
    convolution(128, 256, 3, 56, 56),
    convolution(256, 256, 3, 56, 56),
    convolution(256, 512, 3, 28, 28),
    convolution(512, 512, 3, 28, 28),
    convolution(512, 512, 3, 14, 14),
    convolution(512, 512, 3, 14, 14),
    full(25088, 4096),
    full(4096, 4096),
    full(4096, 1000),
]
OVERFEAT_FAST = [
    convolution(3, 96, 11, 56, 231),
    convolution(96, 256, 5, 24, 28),
    convolution(256, 512, 3, 12, 12),
    convolution(512, 1024, 3, 12, 12),
    convolution(1024, 1024, 3, 12, 12),
    full(36864, 3072),
    full(3072, 4096),
    full(4096, 1000),
]
SPEECH = [full(429, 2048), *(full(2048, 2048) for _ in range(6)), full(2048, 9304)]

IMAGES_S = 2510 / 90
"""Of VGG-A on one node of the Cray, 54 % of its peak, and about as many on one of Amazon's."""
FLOP_S = IMAGES_S * sum(each.flop for each in VGG_A)
ARIES, ETHERNET = Link(7e9), Link.parse("10 Gbit/s")


@dataclass(frozen=True)
class Published:
    name: str
    layers: list[Layer]
    nodes: int
    rows: int
    link: Link
    speedup: float

    def predicted(self, message_s: float = MESSAGE_S) -> float:
        exchanges = [best_exchange(each, self.rows, self.nodes, 0.0) for each in self.layers]
        flop = sum(each.flop for each in self.layers) * self.rows / self.nodes
        found = step(
            self.layers,
            exchanges,
            self.nodes,
            flop / FLOP_S,
            self.link,
            hidden_behind="step",
            bucket=None,
            message_s=message_s,
        )
        return self.nodes * found.efficiency


RUNS = [
    Published("VGG-A, 128 nodes", VGG_A, 128, 512, ARIES, 90.0),
    Published("VGG-A, 64 nodes", VGG_A, 64, 256, ARIES, 53.0),
    Published("OverFeat-FAST, 64 nodes", OVERFEAT_FAST, 64, 256, ARIES, 42.0),
    Published("speech, 16 nodes", SPEECH, 16, FRAMES, ARIES, 6.5),
    Published("VGG-A on Ethernet, 16 nodes", VGG_A, 16, 256, ETHERNET, 14.0),
]
