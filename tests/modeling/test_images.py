"""Images are bounded before they are decoded, and counted by the model itself."""

from __future__ import annotations

import io
import struct
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from modeling.images import (
    ImageError,
    ImageTooLarge,
    decode_image,
    expand_placeholders,
    feature_count,
    image_inputs,
    image_size,
)
from tests.tiny_models import IMAGE, draw_image


def png_claiming(width: int, height: int) -> bytes:
    """A tiny PNG whose header claims a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", (5_000, 15_000, 60_000))
def test_a_bomb_is_refused_by_its_header(side):
    with pytest.raises(ImageTooLarge, match="pixels"):
        decode_image(png_claiming(side, side), max_pixels=10**6)


@pytest.mark.parametrize(
    ("width", "height", "words"),
    (
        (2049, 2048, "2049 x 2048 = 4196352 pixels, the limit is 4194304"),
        (1_000_000, 1, "1000000 x 1 pixels; one side may be at most 200 times the other"),
        (2, 402, "200 times"),
    ),
)
def test_large_and_narrow_images_are_refused_by_their_header(width, height, words):
    data = png_claiming(width, height)
    for read in (image_size, decode_image):
        with pytest.raises(ImageTooLarge, match=words):
            read(data)


def test_the_largest_and_narrowest_images_pass():
    assert image_size(png_claiming(2048, 2048)) == (2048, 2048)
    assert image_size(png_claiming(2, 400)) == (2, 400)


def test_one_decoded_image_lives_at_a_time(load, monkeypatch):
    """A batch of images at full size would be gigabytes."""
    alive: list[weakref.ref] = []
    counts = []

    def watched(*arguments, **limits):
        image = decode_image(*arguments, **limits)
        alive.append(weakref.ref(image))
        counts.append(sum(one() is not None for one in alive))
        return image

    monkeypatch.setattr("modeling.images.decode_image", watched)
    inputs = image_inputs(load("llava"), [draw_image(seed, side=200) for seed in range(5)])
    assert counts == [1] * 5
    assert inputs["pixel_values"].shape == (5, 3, 28, 28)


def test_images_that_were_let_in_are_not_measured_again(load):
    """Their limits are the service's settings, which may be wider than the defaults."""
    inputs = image_inputs(load("llava"), [draw_image(0, side=2050)])
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)


@pytest.mark.parametrize(
    "processor",
    (
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 28},
            crop_size={"height": 28, "width": 28},
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        ),
        PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
        Qwen2VLImageProcessorPil(),
    ),
)
def test_one_by_one_is_what_the_processor_makes_of_all_together(load, processor):
    loaded = load("llava")
    names = frozenset(("pixel_values", "image_sizes", "image_grid_thw"))
    loaded.__dict__.update(image_processor=processor, forward_arguments=names)
    random = np.random.default_rng(0)
    images = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in ((40, 60), (90, 30), (56, 56))
    ]
    wanted = processor(images=images, return_tensors="pt")
    found = image_inputs(loaded, images)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


def test_too_many_bytes():
    data = draw_image(0)
    with pytest.raises(ImageTooLarge, match=f"{len(data)} bytes"):
        decode_image(data, max_bytes=len(data) - 1)
    assert decode_image(data, max_bytes=len(data)).size == (28, 28)


@pytest.mark.parametrize(
    "data",
    (
        b"",
        b"no image",
        draw_image(0)[:-200],
        draw_image(0)[:30],
        png_claiming(20, 20),
        b"GIF89a" + bytes(50),
    ),
)
def test_unreadable_images(data):
    with pytest.raises(ImageError) as caught:
        decode_image(data)
    assert not isinstance(caught.value, ImageTooLarge)


def test_every_truncation_and_flipped_byte_is_an_image_or_an_error():
    """Damaged files never raise anything else."""
    buffer = io.BytesIO()
    decode_image(draw_image(1)).save(buffer, format="JPEG")
    random = np.random.default_rng(0)
    for data in (draw_image(1), buffer.getvalue()):
        for _ in range(150):
            damaged = bytearray(data)
            damaged[random.integers(len(damaged))] ^= 1 << int(random.integers(8))
            damaged = damaged[: random.integers(1, len(damaged))]
            try:
                decode_image(bytes(damaged), max_pixels=10**6)
            except ImageError:
                continue


@pytest.mark.parametrize("name", ("llava", "internvl"))
def test_features_are_counted_by_the_model_and_remembered(load, name):
    loaded = load(name)
    assert feature_count(loaded, decode_image(draw_image(0))) == 4
    assert loaded.feature_counts == {(28, 28): 4}
    loaded.model.get_image_features = None  # not asked again
    assert feature_count(loaded, decode_image(draw_image(5))) == 4


def test_an_image_the_model_cannot_take(load):
    loaded = load("llava")
    loaded.image_processor.do_resize = False
    with pytest.raises(ImageError, match="30 x 30"):
        feature_count(loaded, Image.new("RGB", (30, 30)))
    with pytest.raises(ImageError, match="text-only"):
        image_inputs(load("llama"), [draw_image(0)])


def test_other_modes_become_rgb(load):
    buffer = io.BytesIO()
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(buffer, "PNG")
    inputs = image_inputs(load("llava"), [buffer.getvalue(), draw_image(0)])
    assert inputs["pixel_values"].shape == (2, 3, 28, 28)
    assert inputs["pixel_values"].dtype == torch.float32


def test_placeholders_are_expanded():
    ids = expand_placeholders([1, IMAGE, 9, IMAGE], [2, 3], IMAGE)
    assert ids.tolist() == [1, IMAGE, IMAGE, 9, IMAGE, IMAGE, IMAGE]
    assert ids.dtype == np.int32
    assert expand_placeholders([1, 2], [], IMAGE).tolist() == [1, 2]
    with pytest.raises(ImageError, match=r"2 image placeholders .* 1 images"):
        expand_placeholders([IMAGE, IMAGE], [4], IMAGE)
