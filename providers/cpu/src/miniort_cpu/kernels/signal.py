"""Signals: windows, Fourier transforms, and the mel scale."""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array, dtype_from_onnx
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import FLOAT64, as_dtype, widen

kernels = KernelTable("cpu")


def _window(formula: Callable[[Array], Array]) -> CompileKernel:
    """A kernel for a window function. size: [] -> [size] of `output_datatype`.

    formula(angle): its value where the window's length is 2π; that is `size` steps, or size - 1 if it isn't `periodic`.
    """

    def compile_window(node: NodeContext) -> Run:
        periodic, dtype = bool(node.attribute("periodic", 1)), dtype_from_onnx(node.attribute("output_datatype", 1))

        def run(size: Array) -> Array:
            count = int(size.item())
            steps = count if periodic else count - 1
            return formula(np.arange(count, dtype=FLOAT64) * (2 * pi) / steps).astype(dtype)

        return run

    return compile_window


kernels.register("HannWindow", versions=(17, None))(_window(lambda angle: 0.5 - 0.5 * np.cos(angle)))
kernels.register("HammingWindow", versions=(17, None))(_window(lambda angle: 25 / 46 - 21 / 46 * np.cos(angle)))
kernels.register("BlackmanWindow", versions=(17, None))(_window(lambda angle: 0.42 - (0.5 * np.cos(angle) - 0.08 * np.cos(2 * angle))))


def _complex(x: Array) -> Array:
    """Complex numbers from their parts. x: [..., 1] or [..., 2] float32 or float64 -> [...] complex, or real where there's one part."""
    if x.shape[-1] == 1:
        return x[..., 0]
    return np.ascontiguousarray(x).view(np.result_type(x.dtype, np.complex64))[..., 0]


def _parts(x: Array) -> Array:
    """Complex numbers as their parts. x: [...] complex -> [..., 2]."""
    return np.stack([x.real, x.imag], -1)


def _transform(signal: Array, length: int, axis: int, inverse: bool, onesided: bool) -> Array:
    """The discrete Fourier transform along an axis. signal: [..., n, ...] real or complex -> [..., bins, ..., 2], or 1 if it's real."""
    if inverse:
        return np.fft.irfft(signal, length, axis)[..., None] if onesided else _parts(np.fft.ifft(signal, length, axis))
    if onesided and signal.dtype.kind != "c":
        return _parts(np.fft.rfft(signal, length, axis))
    result = _parts(np.fft.fft(signal, length, axis))
    return result[(slice(None),) * axis + (slice(length // 2 + 1),)] if onesided else result


@kernels.register("DFT", versions=(17, None))
def dft(node: NodeContext) -> Run:
    """The discrete Fourier transform, or its inverse, along an axis (an attribute until version 17, an input from 20).

    x: [..., 1] real or [..., 2] complex; length: [] int; axis: [] int64 -> [..., 2], with `onesided` and `inverse` [..., 1]
    """
    inverse, onesided = bool(node.attribute("inverse", 0)), bool(node.attribute("onesided", 0))
    default = node.attribute("axis", 1) if node.version < 20 else -2

    def run(x: Array, length: Array | None = None, axis: Array | None = None) -> Array:
        place = normalize_axis(default if axis is None else int(axis.item()), x.ndim)
        if place == x.ndim - 1:
            raise ValueError(f"DFT can't go along axis {place}, the last one, which holds the parts of complex numbers")
        size = x.shape[place]
        count = int(length.item()) if length is not None else 2 * (size - 1) if inverse and onesided else size
        return as_dtype(_transform(_complex(widen(x)), count, place, inverse, onesided), x.dtype)

    return run


@kernels.register("STFT", versions=(17, None))
def stft(node: NodeContext) -> Run:
    """The Fourier transforms of frames of a signal, each multiplied with a window.

    signal: [N, L, 1] real or [N, L, 2] complex; step: []; window: [frame length]; length: [] -> [N, frames, bins, 2]
    """
    onesided = bool(node.attribute("onesided", 1))

    def run(signal: Array, step: Array, window: Array | None = None, length: Array | None = None) -> Array:
        size = int(length.item()) if length is not None else len(window) if window is not None else signal.shape[1]
        frames = np.lib.stride_tricks.sliding_window_view(_complex(widen(signal)), size, 1)[:, :: int(step.item())]
        if window is not None:
            frames = frames * widen(window)
        return as_dtype(_transform(frames, size, 2, False, onesided), signal.dtype)

    return run


def _mel(hertz: float) -> float:
    """A frequency on the mel scale."""
    return float(2595 * np.log10(1 + hertz / 700))


@kernels.register("MelWeightMatrix", versions=(17, None))
def mel_weight_matrix(node: NodeContext) -> Run:
    """Triangles over a spectrum's bins, evenly spaced on the mel scale, each with peak 1.

    All inputs: [] -> [dft_length / 2 + 1, num_mel_bins]
    """
    dtype = dtype_from_onnx(node.attribute("output_datatype", 1))

    def run(mel_bins: Array, dft_length: Array, sample_rate: Array, lower: Array, upper: Array) -> Array:
        bands, length = int(mel_bins.item()), int(dft_length.item())
        low, high = _mel(float(lower.item())), _mel(float(upper.item()))
        mels = low + np.arange(bands + 2) * (high - low) / (bands + 2)
        edges = np.floor((length + 1) * 700 * (10 ** (mels / 2595) - 1) / int(sample_rate.item())).astype(np.int64)
        left, center, right = edges[:-2], edges[1:-1], edges[2:]
        at = np.arange(length // 2 + 1)[:, None]
        rising = np.where(center > left, (at - left) / (center - left), 1.0)
        falling = (right - at) / (right - center)
        weights = np.where((at >= left) & (at <= center), rising, np.where((at > center) & (at < right), falling, 0.0))
        return weights.astype(dtype)

    return run
