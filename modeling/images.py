"""Images: encoded bytes -> model inputs, and how many features a model makes of one."""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import BaseImageProcessor

from modeling.image_limits import MAX_ASPECT, MAX_BYTES, MAX_PIXELS
from modeling.load import LoadedModel

FORMATS = ("PNG", "JPEG", "WEBP")
# What Pillow's decoders raise on damaged files.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError)


class ImageError(ValueError):
    """An image that cannot be used: unreadable, or not what the model takes."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than allowed. Nothing was decoded."""


class ImageTooNarrow(ImageTooLarge):
    """One side is too many times the other. Nothing was decoded."""


def image_size(
    data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """(width, height) in pixels, from the header alone.

    Raises:
        ImageTooLarge: more bytes or pixels than allowed.
        ImageTooNarrow: sides in a ratio beyond MAX_ASPECT.
        ImageError: not an image of these formats.
    """
    with _reading(max_pixels):
        return _open(data, max_bytes, max_pixels).size


def decode_image(
    data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Decode PNG, JPEG or WebP to RGB.

    The size is read from the header and checked before any pixel is decoded, so that a small file
    cannot unfold into gigabytes.

    Raises:
        ImageTooLarge, ImageTooNarrow: see image_size.
        ImageError: not an image of these formats, or damaged.
    """
    with _reading(max_pixels):
        return _open(data, max_bytes, max_pixels).convert("RGB")


def _open(data: bytes, max_bytes: int, max_pixels: int) -> Image.Image:
    """With its size checked, and no pixel decoded yet."""
    if len(data) > max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes, the limit is {max_bytes}")
    with warnings.catch_warnings():
        # Our own limit below is the one that counts.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"the image has {width} x {height} = {width * height} pixels, the limit is "
            f"{max_pixels}; scale it down"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageTooNarrow(
            f"the image has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times "
            "the other"
        )
    return image


@contextmanager
def _reading(max_pixels: int) -> Iterator[None]:
    """Pillow's errors as ours."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"the image has too many pixels, the limit is {max_pixels}") from error
    except ImageTooLarge:
        raise
    except DAMAGED as error:
        kinds = ", ".join(FORMATS)
        raise ImageError(f"the image cannot be read as {kinds}: {error}") from error


def image_inputs(loaded: LoadedModel, images: Sequence[Image.Image | bytes]) -> dict[str, Tensor]:
    """Pixel values, and what else the model's forward wants of its image processor.

    Encoded images are decoded and processed one after the other: a batch of them never lies in
    memory at full size.

    Args:
        images: decoded, or encoded and already checked by decode_image.

    Returns:
        On the model's device, floating values in its dtype. Empty when there are no images.

    Raises:
        ImageError: the model takes none, or the processor refuses one.
    """
    if not images:
        return {}
    if loaded.image_processor is None:
        raise ImageError(f"{loaded.model_id} is a text-only model; it takes no images")
    parts = [_process(loaded, loaded.image_processor, one) for one in images]
    return {
        name: _concatenate([part[name] for part in parts]).to(loaded.device) for name in parts[0]
    }


def _process(
    loaded: LoadedModel, processor: BaseImageProcessor, image: Image.Image | bytes
) -> dict[str, Tensor]:
    """What the model's forward wants of one image, on the CPU."""
    if isinstance(image, bytes):
        # Its limits were those of whoever let it in.
        image = decode_image(image, max_bytes=sys.maxsize, max_pixels=sys.maxsize)
    try:
        features = processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise ImageError(f"the image processor refuses an image: {error}") from error
    wanted = loaded.forward_arguments
    return {
        name: value.to(dtype=loaded.model.dtype if value.is_floating_point() else None)
        for name, value in features.items()
        if name in wanted and isinstance(value, Tensor)
    }


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """[N_i, ...] -> [sum N_i, ...]; smaller ones get zeros at their ends, as the processors that
    take images of several sizes do themselves."""
    sides = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    whole = parts[0].new_zeros((sum(len(part) for part in parts), *sides))
    start = 0
    for part in parts:
        rows = slice(start, start + len(part))
        whole[(rows, *(slice(side) for side in part.shape[1:]))] = part
        start += len(part)
    return whole


@torch.no_grad()
def feature_count(loaded: LoadedModel, image: Image.Image) -> int:
    """How many placeholders an image stands for, by asking the model itself.

    The answer depends on the image's size alone and is remembered by it.

    Raises:
        ImageError: the model takes no images, or none of this size.
    """
    known = loaded.feature_counts.get(image.size)
    if known is not None:
        return known
    inputs = image_inputs(loaded, [image])
    try:
        features = loaded.model.get_image_features(**inputs)  # type: ignore[operator]
    except (ValueError, RuntimeError) as error:
        raise ImageError(
            f"{loaded.model_id} cannot take an image of {image.size[0]} x {image.size[1]} pixels: "
            f"{error}"
        ) from error
    count = _count(features)
    loaded.feature_counts[image.size] = count
    return count


def expand_placeholders(
    ids: Sequence[int] | NDArray[np.integer], feature_counts: Sequence[int], placeholder_id: int
) -> NDArray[np.int32]:
    """Turn one placeholder an image into as many as the image has features.

    Args:
        ids: int [tokens] with one placeholder an image.
        feature_counts: per image, in order; see feature_count.

    Raises:
        ImageError: another number of placeholders than images.
    """
    ids_T = np.asarray(ids, dtype=np.int32)
    is_placeholder_T = ids_T == placeholder_id
    if is_placeholder_T.sum() != len(feature_counts):
        raise ImageError(
            f"{is_placeholder_T.sum()} image placeholders (id {placeholder_id}) for "
            f"{len(feature_counts)} images; write one per image"
        )
    repeats_T = np.ones(len(ids_T), dtype=np.int64)
    repeats_T[is_placeholder_T] = feature_counts
    return np.repeat(ids_T, repeats_T)


def _count(output: Any) -> int:
    """Features in what get_image_features returns: a tensor [..., D] or a sequence of them."""
    features = getattr(output, "pooler_output", output)
    parts = [features] if isinstance(features, Tensor) else list(features)
    return sum(part.numel() // part.shape[-1] for part in parts)
