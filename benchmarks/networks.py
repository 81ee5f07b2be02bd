"""The two networks whose training over gloo is benchmarked."""

from collections.abc import Callable

import digits
from torch import nn


def build_cnn() -> nn.Sequential:
    """Returns a LeNet-sized CNN on 28 x 28 images given as 784 numbers: 206,922 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {"mlp": digits.build_mlp, "cnn": build_cnn}
