"""What blending is for: a slice, its output in patches that do not overlap, and the blended output.

A network of 3 x 3 convolutions learns in seconds to find the membranes of drawn cells, in patches
whose borders it sees zeros behind. Prints how much the output jumps across the patches' borders,
against elsewhere, and with ``--output`` draws the picture of docs/volumes.md.
"""

from pathlib import Path

import harness
import numpy as np
import torch
from scipy.ndimage import distance_transform_edt, gaussian_filter
from torch import nn

from sparkdl.volumes.chunk import Recipe, predict_chunk
from sparkdl.volumes.grid import Patches

SIZE, PATCH, OVERLAP, STEPS = 256, 48, 24, 300
SHOWN = slice(40, 200)


class Array:
    """One slice in memory, as a chunk reads and writes it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def read(self, bounds: tuple[tuple[int, int], ...]) -> "Array":
        return Array(self.values[(slice(None), *(slice(*each) for each in bounds))])

    def write(self, bounds: tuple[tuple[int, int], ...], values: torch.Tensor) -> "Array":
        self.values[(slice(None), *(slice(*each) for each in bounds))] = values.numpy()
        return self

    def result(self) -> np.ndarray:
        return self.values


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a noisy slice of cells, and where their membranes are, each shape (SIZE, SIZE)."""
    draws = np.random.default_rng(seed)
    centers = draws.integers(0, SIZE, (90, 2))
    place = np.stack(np.meshgrid(*[np.arange(SIZE)] * 2, indexing="ij"), axis=-1)
    cells = ((place[:, :, None] - centers) ** 2).sum(-1).argmin(-1)
    inside = np.ones((SIZE, SIZE), bool)
    for axis in (0, 1):
        inside &= cells == np.roll(cells, 1, axis)
    distance = distance_transform_edt(inside)
    brightness = 0.55 + 0.25 * draws.random(90)[cells] - 0.5 * np.exp(-((distance / 2) ** 2))
    noisy = gaussian_filter(brightness + draws.normal(0, 0.25, brightness.shape), 0.7)
    return noisy.astype(np.float32), (distance < 2.5).astype(np.float32)


def trained() -> nn.Module:
    """Returns a network that finds membranes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width_in, width in [(1, 12), (12, 12), (12, 12), (12, 12)]:
        layers += [nn.Conv2d(width_in, width, 5, padding=2), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Conv2d(12, 1, 1))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    pairs = [drawn(seed) for seed in range(4)]
    draws = np.random.default_rng(1)
    for _ in range(STEPS):
        corners = draws.integers(0, SIZE - PATCH, (8, 2))
        chosen = [(pairs[k % 4], y, x) for k, (y, x) in enumerate(corners)]
        cuts = [[each[y : y + PATCH, x : x + PATCH] for each in pair] for pair, y, x in chosen]
        given, wanted = (
            torch.from_numpy(np.stack(each)[:, None]) for each in zip(*cuts, strict=True)
        )
        loss = nn.functional.binary_cross_entropy_with_logits(network(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def predicted(network: nn.Module, slice_: np.ndarray, overlap: int) -> np.ndarray:
    """Returns the output for a slice, shape (SIZE, SIZE)."""
    patches = Patches(slice_.shape, (PATCH, PATCH), (overlap, overlap), (0, 0))
    output = Array(np.zeros((1, *slice_.shape), np.float32))
    bounds = tuple((0, n) for n in slice_.shape)

    @torch.no_grad()
    def outputs(given: np.ndarray) -> torch.Tensor:
        result: torch.Tensor = network(torch.from_numpy(given)).sigmoid()
        return result

    recipe = Recipe(patches, (SIZE, SIZE), 1, 1, labels=False, skip_zeros=False)
    predict_chunk(recipe, bounds, Array(slice_[None]), output, outputs, "cpu")
    return output.values[0]


def jumps(output: np.ndarray) -> float:
    """Returns the mean step across the borders of patches that do not overlap, / elsewhere."""
    steps = np.abs(np.diff(output, axis=1)).mean(0)
    borders = np.arange(PATCH - 1, SIZE - 1, PATCH)
    return float(steps[borders].mean() / np.delete(steps, borders).mean())


def draw(output: Path, pictures: dict[str, np.ndarray]) -> None:
    """Draws slices side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    columns = figure.subplots(1, len(pictures))
    for axes, (title, picture) in zip(columns, pictures.items(), strict=True):
        axes.imshow(picture[SHOWN, SHOWN], cmap="gray", interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    figure.savefig(output, dpi=100)


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--output", type=Path, help="the picture, a PNG file")
    chosen = harness.parse(options, repeats=1)
    torch.set_num_threads(1)
    network, (slice_, _) = trained(), drawn(99)
    apart, blended = (predicted(network, slice_, overlap) for overlap in (0, OVERLAP))
    if chosen.output:
        draw(
            chosen.output,
            {
                "input": slice_,
                f"patches of {PATCH}, no overlap": apart,
                f"patches of {PATCH}, {OVERLAP} overlap, blended": blended,
            },
        )
    found = {"no overlap": jumps(apart), "blended": jumps(blended)}
    for name, ratio in found.items():
        print(f"{name}: steps across borders / elsewhere {ratio:.2f}")
    claim = harness.Claim(
        name="blended: steps across borders / elsewhere", ratio=found["blended"], target=1.2
    )
    harness.report("volume_seams", [claim], {"steps": found})


if __name__ == "__main__":
    main()
