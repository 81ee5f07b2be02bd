"""Drawn images as files, and what plain Pillow makes of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
FITTED = {
    "crop": ImageOps.fit,
    "pad": ImageOps.pad,
    "stretch": lambda image, size: image.resize(size),
}
ORIENTATION = 0x0112


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture with edges, gradients, noise, no symmetry, and alpha where the mode has it."""
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(height) * 97 % 251, np.arange(width) * 31 % 241)
    channels = [ramp % 256, ramp.T.reshape(-1)[: ramp.size].reshape(ramp.shape) % 256]
    channels += [rng.integers(0, 256, ramp.shape), 255 - ramp % 200]
    image = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((1, 1, width // 2, height // 3), fill=(250, 10, 20, 255))
    pen.line((0, height - 1, width // 2, height // 2), fill=(0, 0, 250, 120), width=2)
    if mode in ("RGBA", "LA"):
        return image.convert(mode)
    return image.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str, orientation: int = 1, **options: Any) -> bytes:
    """The image as a file, which says how it is turned."""
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def on_white(image: Image.Image) -> Image.Image:
    """The image without transparency."""
    if image.mode not in ("LA", "RGBA") and "transparency" not in image.info:
        return image
    clear = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)


def by_pillow(octets: bytes, channels: int, fit: str, size: tuple[int, int]) -> np.ndarray:
    """The pixels, shape (channels, height, width), of a file by Pillow's own functions.

    Args:
        octets: the file.
        channels: of the result.
        fit: a key of ``FITTED``.
        size: width and height of the result.
    """
    image = Image.open(io.BytesIO(octets))
    if image.format == "JPEG":
        turned = image.getexif().get(ORIENTATION, 1) >= 5
        width, height = size[::-1] if turned else size
        image.draft(None, (2 * width, 2 * height))
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        shades = np.rint(np.asarray(upright).astype(float) / 257)
        upright = Image.fromarray(shades.astype(np.uint8))
    if channels != 4:
        upright = on_white(upright)
    fitted = FITTED[fit](upright.convert(MODES[channels]), size)
    return np.asarray(fitted).reshape(size[1], size[0], channels).transpose(2, 0, 1)
