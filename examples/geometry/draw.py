"""Draw a rectangle of w x h cells: offset, cell size, colours and noise follow from a seed."""

import io

import numpy as np
from PIL import Image

IMAGE_SIZE = 56
CELL_SIZES = (6, 7, 8)  # pixels; the largest side times the largest cell must fit
NOISE = 8.0  # standard deviation of the pixel noise, of 255


def draw(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """A picture of ``width`` x ``height`` cells with grid lines, somewhere on a plain ground."""
    cell = int(rng.choice(CELL_SIZES))
    across, down = width * cell + 1, height * cell + 1
    left = int(rng.integers(0, IMAGE_SIZE - across + 1))
    top = int(rng.integers(0, IMAGE_SIZE - down + 1))
    ground = rng.integers(170, 256, size=3)
    fill = rng.integers(90, 170, size=3)
    line = rng.integers(0, 60, size=3)

    pixels = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.float32)
    pixels[:] = ground
    box = pixels[top : top + down, left : left + across]
    box[:] = fill
    box[::cell] = line
    box[:, ::cell] = line
    pixels += rng.normal(0.0, NOISE, size=pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8), mode="RGB")


def png(image: Image.Image) -> bytes:
    """The picture as PNG bytes: what travels in prompt files and on the wire."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
