"""The builder of ImageDecoder."""

from __future__ import annotations

import io

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import Array


@builds("ImageDecoder")
def image_decoder(d: Draws, operator: Operator) -> NodeCase:
    """A small image in a format without loss, grey or in colour, decoded to each pixel format."""
    from PIL import Image

    pixels = d.rng().integers(0, 256, (d.integer(1, 4), d.integer(1, 4), *d.choice([(), (3,)])), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, d.choice(["PNG", "BMP", "TIFF"]))
    attributes = d.some(pixel_format=d.choice(["RGB", "BGR", "Grayscale"]))
    encoded = np.frombuffer(stream.getvalue(), np.uint8)
    target = attributes.get("pixel_format", "RGB")
    return NodeCase([encoded], attributes, constants=d.constants(0), expected=lambda inputs: [converted(pixels, target)])


def converted(pixels: Array, target: str) -> Array:
    """Pixels [H, W] or [H, W, 3] in another format; grey is the luma of ITU-R 601. -> [H, W, 1 or 3]."""
    if target == "Grayscale":
        luma = pixels if pixels.ndim == 2 else np.floor(pixels @ np.array([19595, 38470, 7471]) / 65536 + 0.5).astype(np.uint8)
        return luma[..., None]
    colours = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    return colours[..., ::-1] if target == "BGR" else colours
