"""ImageDecoder, where Pillow is installed, and its error where it isn't."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest

from miniort.errors import KernelError


@pytest.mark.parametrize(("pixel_format", "channels"), [("RGB", 3), ("BGR", 3), ("Grayscale", 1)])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_images(kind, pixel_format, channels, node, same):
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    stream = io.BytesIO()
    pillow.fromarray(pixels).save(stream, kind)
    encoded = np.frombuffer(stream.getvalue(), np.uint8)
    got = node("ImageDecoder", 20, [encoded], pixel_format=pixel_format)(encoded)[0]
    assert got.shape == (5, 7, channels)
    if pixel_format == "Grayscale":
        luma = pixels @ np.array([0.299, 0.587, 0.114])
        assert np.abs(got[..., 0] - luma).max() <= 1
    else:
        same(got, pixels if pixel_format == "RGB" else pixels[..., ::-1])


def test_what_is_no_image_is_empty(node):
    pytest.importorskip("PIL.Image")
    noise = np.arange(100, dtype=np.uint8)
    assert node("ImageDecoder", 20, [noise])(noise)[0].shape == (0, 0, 3)


def test_without_pillow(node, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("miniort_cpu.kernels.image_decoder.find_spec", lambda name: None if name == "PIL" else found(name))
    stream = np.zeros(4, np.uint8)
    with pytest.raises(KernelError, match=r"miniort-cpu\[image\]"):
        node("ImageDecoder", 20, [stream])(stream)
    with pytest.raises(KernelError, match="pixel_format 'CMYK'"):
        node("ImageDecoder", 20, [stream], pixel_format="CMYK")(stream)
