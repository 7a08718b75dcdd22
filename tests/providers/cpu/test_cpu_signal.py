"""DFT, STFT, the windows and MelWeightMatrix."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import RunError
from miniort.types import dtype_to_onnx


def parts(x):
    return np.stack([x.real, x.imag], -1)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("length", [None, 4, 9])
def test_dft(axis, length, node, same, versions, types_of, sample):
    for schema in versions("DFT"):
        version = schema.since_version
        for dtype in types_of(schema, "T1"):
            atol = 0.3 if np.dtype(dtype).itemsize == 2 else 1e-4
            real, pair = sample(dtype, (3, 6, 1)), sample(dtype, (3, 6, 2))
            wide, numbers = real[..., 0].astype(np.float64), pair[..., 0].astype(np.float64) + 1j * pair[..., 1].astype(np.float64)
            size = None if length is None else np.array(length)
            place = axis % 3

            def transform(x, size=size, version=version, **attributes):
                if version < 20:
                    return node("DFT", version, [x, size], axis=axis, **attributes)(x, size)[0]
                return node("DFT", version, [x, size, np.int64], **attributes)(x, size, np.array(axis))[0]

            same(transform(real), parts(np.fft.fft(wide, length, place)).astype(dtype), atol=atol)
            same(transform(real, onesided=1), parts(np.fft.rfft(wide, length, place)).astype(dtype), atol=atol)
            same(transform(pair), parts(np.fft.fft(numbers, length, place)).astype(dtype), atol=atol)
            same(transform(pair, inverse=1), parts(np.fft.ifft(numbers, length, place)).astype(dtype), atol=atol)
            same(transform(pair, inverse=1, onesided=1), np.fft.irfft(numbers, length, place)[..., None].astype(dtype), atol=atol)


def test_dft_refuses_the_axis_of_the_parts(node):
    x = np.zeros((2, 4, 1), np.float32)
    with pytest.raises(RunError, match="complex"):
        node("DFT", 20, [x, None, np.int64])(x, None, np.array(-1))


def test_stft(node, same, versions, types_of, sample):
    for dtype in types_of(versions("STFT")[0], "T1"):
        atol = 0.2 if np.dtype(dtype).itemsize == 2 else 1e-4
        signal, window = sample(dtype, (2, 20, 1)), sample(dtype, (6,), 3)
        step = np.array(4, np.int32)
        frames = np.stack([signal[:, i : i + 6, 0].astype(np.float64) for i in range(0, 15, 4)], 1)
        weighted = frames * window.astype(np.float64)
        same(node("STFT", 17, [signal, step, window])(signal, step, window)[0], parts(np.fft.rfft(weighted)).astype(dtype), atol=atol)
        got = node("STFT", 17, [signal, step, window], onesided=0)(signal, step, window)[0]
        same(got, parts(np.fft.fft(weighted)).astype(dtype), atol=atol)
        length = np.array(6, np.int32)
        got = node("STFT", 17, [signal, step, None, length])(signal, step, None, length)[0]
        same(got, parts(np.fft.rfft(frames)).astype(dtype), atol=atol)
        pair = sample(dtype, (1, 6, 2))
        whole = pair[..., 0].astype(np.float64) + 1j * pair[..., 1].astype(np.float64)
        got = node("STFT", 17, [pair, step], onesided=0)(pair, step)[0]
        same(got, parts(np.fft.fft(whole))[:, None].astype(dtype), atol=atol)


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows(op, node, same, versions, types_of):
    for dtype in types_of(versions(op)[0], "T2"):
        for periodic in (0, 1):
            for size in (np.array(10, np.int32), np.array(7), np.array(0)):
                model = node(op, 17, [size], periodic=periodic, output_datatype=dtype_to_onnx(dtype))
                angle = 2 * np.pi * np.arange(size) / (size if periodic else size - 1)
                want = {
                    "HannWindow": np.sin(angle / 2) ** 2,
                    "HammingWindow": 25 / 46 - 21 / 46 * np.cos(angle),
                    "BlackmanWindow": 0.42 - 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle),
                }[op]
                if np.dtype(dtype).kind in "iu":
                    assert (np.abs(model(size)[0].astype(np.float64) - want) <= 1).all()
                else:
                    same(model(size)[0], want.astype(dtype), atol=1e-6)


def test_mel_weights(node, same, versions, types_of):
    for dtype in types_of(versions("MelWeightMatrix")[0], "T3"):
        for bands, length, rate, low, high in ((8, 16, 8192, 0, 4096), (20, 128, 16000, 80, 7600)):
            inputs = [np.array(each) for each in (bands, length, rate)] + [np.array(each, np.float32) for each in (low, high)]
            got = node("MelWeightMatrix", 17, inputs, output_datatype=dtype_to_onnx(dtype))(*inputs)[0]
            want = node("MelWeightMatrix", 17, inputs).reference(*inputs)[0]
            same(got, want.astype(dtype), atol=1e-6)
