"""ImageDecoder, by Pillow, which is an extra of this package."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from io import BytesIO

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array

kernels = KernelTable("cpu")

PILLOW_MODE = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
"""`pixel_format` -> what Pillow calls it; BGR is turned around afterwards."""


@kernels.register("ImageDecoder", versions=(20, None))
def image_decoder(node: NodeContext) -> Run:
    """The pixels of an encoded image, without any where it can't be decoded. stream: [bytes] uint8 -> [H, W, 3 or 1] uint8."""
    pixel_format = node.attribute("pixel_format", "RGB")
    if pixel_format not in PILLOW_MODE:
        raise KernelError(f"node {node.name!r} (ImageDecoder) has pixel_format {pixel_format!r}; known are {', '.join(PILLOW_MODE)}")
    if find_spec("PIL") is None:
        raise KernelError(f"node {node.name!r} (ImageDecoder) needs Pillow, which isn't installed: pip install 'miniort-cpu[image]'")
    pillow = import_module("PIL.Image")

    def run(stream: Array) -> Array:
        try:
            with pillow.open(BytesIO(stream.tobytes())) as image:
                pixels = np.array(image.convert(PILLOW_MODE[pixel_format]))
        except (OSError, SyntaxError, ValueError):  # what Pillow raises for a stream of no known format, or a damaged one
            return np.zeros((0, 0, 1 if pixel_format == "Grayscale" else 3), np.uint8)
        if pixel_format == "Grayscale":
            return pixels[:, :, None]
        return pixels[:, :, ::-1].copy() if pixel_format == "BGR" else pixels

    return run
