"""Hashes of pictures and texts, and their bands."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from near_rows import IMAGEHASH, bits_apart, digits, png, word
from pictures import encoded
from PIL import Image, ImageDraw, ImageOps

from sparkdl import NearDuplicates
from sparkdl.dedup import pairs
from sparkdl.dedup.hashing import grey_images, hash_rows, imagehash, simhash
from sparkdl.dedup.pairs import MOST_KEYS, bit_count, dealt, keys_for, near_pairs
from sparkdl.encodings import any_size
from sparkdl.errors import SetupError

KINDS = list(IMAGEHASH)


def hashes(kind: str, files: list[bytes]) -> list[int | None]:
    words, _, _ = hash_rows(kind, pa.array(files, pa.binary()))
    return words.to_pylist()


def natural(seed: int, size: tuple[int, int]) -> Image.Image:
    """Smooth colours, as photographs have, of few pixels enlarged."""
    few = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(few).resize(size, Image.Resampling.BICUBIC)


def hard() -> list[Image.Image]:
    """One colour, symmetric, smaller than a hash, long: where bits hang on ties."""
    images = [Image.new("L", size, c) for size in ((1, 1), (8, 8), (640, 480)) for c in (0, 7, 255)]
    for side in (64, 100, 257):
        box = np.zeros((side, side), np.uint8)
        box[side // 4 : -side // 4, side // 3 : -side // 3] = 200
        slope = np.tile(np.arange(side) % 256, (side, 1)).astype(np.uint8)
        images += [Image.fromarray(each) for each in (box, slope, slope.T.copy())]
    random = np.random.default_rng(3)
    for width, height in ((3, 5), (900, 11), (31, 33), (1100, 1030)):
        noise = random.integers(0, 256, (height, width), dtype=np.uint8)
        images.append(Image.fromarray(noise))
    return images


@every("kind", KINDS)
def test_the_bits_are_those_of_imagehash(kind: str) -> None:
    images = [Image.fromarray(pixels) for pixels in digits(60)[0]] + hard()
    images += [natural(seed, (160 + 7 * seed, 200 - 5 * seed)) for seed in range(4)]
    assert hashes(kind, [png(each) for each in images]) == [word(each, kind) for each in images]


@every("kind", KINDS)
def test_an_image_of_any_mode_and_format_has_the_bits_that_it_has_in_grey(kind: str) -> None:
    image = natural(1, (120, 90))
    files = [
        *(png(image.convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        encoded(image, "JPEG", quality=60),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "BMP"),
        encoded(image, "WEBP", lossless=True),
        encoded(image, "GIF"),
    ]
    wanted = [word(Image.open(io.BytesIO(each)), kind) for each in files]
    assert hashes(kind, files) == wanted


@every("kind", KINDS)
def test_brighter_images_and_jpegs_are_near_and_other_images_are_not(kind: str) -> None:
    images = [natural(seed, (240, 180)) for seed in range(8)]
    plain = hashes(kind, [png(each) for each in images])
    lighter = [min(255, round(v * 1.01)) for v in range(256)] * 3
    brighter = [png(each.point(lighter)) for each in images]
    compressed = [encoded(each, "JPEG", quality=50) for each in images]
    smaller = [png(each.resize((120, 90))) for each in images]
    for changed in (brighter, compressed, smaller):
        assert bits_apart(hashes(kind, changed), plain).max() <= NearDuplicates().getThreshold()
    others = bits_apart(plain, plain[1:] + plain[:1])
    assert 28 < others.mean() < 36
    assert others.min() > 10


NUMBERS = [(name, pa.int32()) for name in ("height", "width", "nChannels", "mode")]
STRUCT = pa.struct([("origin", pa.string()), *NUMBERS, ("data", pa.binary())])


def colours(height: int = 20, width: int = 31, channels: int = 3) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8)


def grey(*files: bytes | None) -> list[Any]:
    return list(grey_images(pa.array(files, pa.binary())))


def row(pixels: np.ndarray, **changes: Any) -> dict[str, Any]:
    height, width, channels = pixels.shape
    mode = {1: 0, 3: 16, 4: 24}[channels]
    values = {"height": height, "width": width, "nChannels": channels, "mode": mode}
    return {"origin": "", **values, "data": pixels.tobytes(), **changes}


def structs(*rows: dict[str, Any] | None) -> list[Any]:
    return list(grey_images(pa.array(rows, STRUCT)))


def test_an_image_is_turned_as_its_exif_says() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = png(Image.fromarray(colours()), exif=exif)
        (found,) = grey(file)
        wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("L")
        assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes()), orientation


def drawings(ink: int, ground: tuple[int, int]) -> list[Image.Image]:
    """Lines of one grey, on a ground of (grey, alpha)."""
    images = []
    for seed in range(8):
        image = Image.new("LA", (64, 64), ground)
        random = np.random.default_rng(seed)
        for _ in range(6):
            line = random.integers(0, 64, 4).tolist()
            ImageDraw.Draw(image).line(line, fill=(ink, 255), width=4)
        images.append(image)
    return images


@every("kind", KINDS)
def test_drawings_on_a_transparent_ground_have_the_bits_of_those_on_one_in_contrast(
    kind: str,
) -> None:
    for ink, contrast in ((0, 255), (255, 0), (128, 255)):
        clear = drawings(ink, (ink, 0))
        wanted = [word(each.convert("L"), kind) for each in drawings(ink, (contrast, 255))]
        assert len(set(wanted)) == 8
        for files in (
            [png(each) for each in clear],
            [png(each.convert("RGBA")) for each in clear],
            [encoded(each.convert("RGBA"), "WEBP", lossless=True) for each in clear],
            [png(each.convert("RGBA").quantize(8)) for each in clear],
            [encoded(each.convert("RGBA"), "GIF") for each in clear],
        ):
            assert hashes(kind, files) == wanted


def test_black_and_white_on_a_transparent_ground_both_show_upright() -> None:
    image = Image.new("RGBA", (8, 4))
    image.putpixel((0, 0), (0, 0, 0, 255))
    image.putpixel((7, 3), (255, 255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    (found,) = grey(png(image, exif=exif))
    assert found.size == (4, 8)
    assert found.getpixel((3, 0)) == 0
    assert found.getpixel((0, 7)) == 255
    assert found.getpixel((0, 0)) == 128


def test_structs_of_spark_have_their_channels_the_other_way_round() -> None:
    blue_first = colours(channels=4)
    blue_first[..., 3] = 255
    red_first = blue_first[..., [2, 1, 0, 3]]
    found = structs(row(blue_first), row(blue_first[..., :3]), row(blue_first[..., :1]), None)
    wanted = map(Image.fromarray, (red_first, red_first[..., :3], blue_first[..., 0]))
    assert [each.tobytes() for each in found[:3]] == [w.convert("L").tobytes() for w in wanted]
    assert found[3] is None


def test_rows_that_are_no_image_say_why_and_null_stays_null() -> None:
    file = encoded(Image.fromarray(colours()), "PNG")
    tiff = encoded(Image.new("F", (3, 3)), "TIFF")
    none, empty, text, cut, deep = grey(None, b"", b"no image", file[: len(file) // 2], tiff)
    assert none is None
    for found in (empty, text, deep):
        assert "not one of BMP, GIF, JPEG, PNG, WEBP" in found
    assert "truncated" in cut
    wrong = ({"data": b"123"}, {"mode": 21}, {"height": -1, "mode": -1})
    short, floats, absent = structs(*(row(colours(), **changes) for changes in wrong))
    assert "has not the bytes of 20 x 31 x 3" in short
    assert "mode 21" in floats
    assert "mode -1" in absent


@pytest.mark.filterwarnings("ignore:Image size")
def test_an_image_that_announces_too_many_pixels_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(any_size, "PIXELS", {False: 600, True: 1_000})
    found, jpeg = grey(*(encoded(Image.fromarray(colours()), form) for form in ("PNG", "JPEG")))
    assert "it announces 20 x 31 pixels, and at most 600" in found
    assert jpeg.size == (31, 20)


def test_a_missing_package_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("PIL.Image", "imagehash"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=r"Pillow.*pip install 'sparkdl-torch\[images\]'"):
        grey(b"")
    with pytest.raises(SetupError, match=r"imagehash.*pip install 'sparkdl-torch\[dedup\]'"):
        imagehash()


TEXT = (
    "Every executor holds a full replica of the model, and the driver averages the parameters. "
    "Rows flow from the partitions of a table into tensors, and never visit the driver."
)
OTHER = (
    "The harbour was quiet that morning; gulls circled above the nets, and somewhere behind the "
    "warehouses a bell rang twice before the ferry left for the islands."
)


def splitmix(state: int) -> int:
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def by_definition(text: str) -> int | None:
    """One character after another."""
    lowered = "".join(c.lower() for c in unicodedata.normalize("NFKC", text))
    kept = [c if unicodedata.category(c)[0] in "LNM" else " " for c in lowered]
    plain = " ".join("".join(kept).split())
    counts = [0] * 64
    for place in range(len(plain)):
        a, b, c, d = (ord(each) for each in plain[place : place + 4].ljust(4, "\0"))
        piece = splitmix(splitmix(a << 32 | b) ^ (c << 32 | d))
        for bit in range(64):
            counts[bit] += 1 if piece >> bit & 1 else -1
    word = sum(1 << bit for bit, count in enumerate(counts) if count > 0)
    return (word - 2**64 if word >= 2**63 else word) if plain else None


def hashes_of_texts(*texts: str) -> list[int | None]:
    words, full = simhash(pa.array(texts, pa.string()))
    return [word if each else None for word, each in zip(words.tolist(), full, strict=True)]


@pytest.mark.versions
@given(st.lists(st.text("abcXYZ 09-_.,äßÉé日本語Ⅷﬁ\n\t\0", max_size=40), max_size=5))
def test_it_is_that_of_its_definition(texts: list[str]) -> None:
    assert hashes_of_texts(*texts) == [by_definition(each) for each in texts]


def test_a_long_text_is_counted_in_parts() -> None:
    texts = [TEXT * 450, "a", OTHER * 20, OTHER]
    assert hashes_of_texts(*texts) == [by_definition(each) for each in texts]


def test_case_and_punctuation_change_nothing_a_word_little_and_another_text_all() -> None:
    changed = TEXT.replace("averages", "combines")
    words = hashes_of_texts(TEXT, TEXT.upper().replace(" ", " - "), changed, OTHER)
    same, near, far = bits_apart(words[1:], words[0]).tolist()
    assert (same, near < 10, far > 20) == (0, True, True)


def test_null_and_texts_without_letters_have_no_hash_and_only_these_are_at_fault() -> None:
    words, faults, _ = hash_rows("simhash", pa.array(["a word", None, " ... ", "", "b"]))
    assert [each is None for each in words.to_pylist()] == [False, True, True, True, False]
    said = "it has neither letters nor digits"
    assert faults.to_pylist() == [None, None, said, said, None]


def words(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, number, dtype=np.int64)


def margins(number: int) -> np.ndarray:
    """Words of which 48 bits are always the same."""
    return words(number) & np.int64(0x00FF00FF00000000)


def copied(originals: np.ndarray) -> np.ndarray:
    """The words, and each again with up to seven other bits."""
    random = np.random.default_rng(1)
    copies = originals
    for _ in range(7):
        flipped = np.uint64(1) << random.integers(64, size=len(copies), dtype=np.uint64)
        copies = copies ^ flipped.view(np.int64)
    return np.append(originals, copies)


@every("sort_cost", (0.0, 1e9))  # many keys; none
def test_near_pairs_are_those_of_a_comparison_of_all(
    sort_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_SORT_COST", sort_cost)
    random = np.random.default_rng(2)
    for threshold in (0, 1, 3, 7, 10, 31, 63):
        for sample in (copied(words(150)), copied(margins(150)), words(1), words(0)):
            groups, sides = random.integers(3, size=(2, len(sample)))
            distance = bits_apart(sample[:, None], sample[None, :])
            near = np.triu(distance <= threshold, 1) & (groups[:, None] == groups)
            for apart in (None, sides):
                wanted = near if apart is None else near & (sides[:, None] != sides)
                first, second, found = near_pairs(sample, groups, threshold, apart)
                order = np.lexsort((second, first))
                assert np.array_equal(np.argwhere(wanted), np.stack([first, second], 1)[order])
                assert np.array_equal(distance[first, second], found)


def test_bits_are_counted_alike_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(np, "bitwise_count", raising=False)  # numpy 1
    some = np.append(words(1_000), (0, -1))
    assert bit_count(some).tolist() == [(each % 2**64).bit_count() for each in some.tolist()]


def test_many_words_have_keys_and_few_are_compared_as_they_are() -> None:
    for number, keys in ((300, 1), (1_000_000, 4)):
        assert len(keys_for(words(number), np.zeros(number, np.int64), 3)) == keys
    apart = np.arange(1_000_000)  # groups of one word
    assert keys_for(words(1_000_000), apart, 3).tolist() == [0]
    for threshold in range(32):
        masks = keys_for(words(50_000), np.zeros(50_000, np.int64), threshold)
        assert len(masks) <= MOST_KEYS


def test_bits_that_are_always_the_same_are_spread_over_the_bands() -> None:
    useful = [(band & 0x00FF00FF00000000).bit_count() for band in dealt(margins(1000), 4)]
    assert useful == [4, 4, 4, 4]
