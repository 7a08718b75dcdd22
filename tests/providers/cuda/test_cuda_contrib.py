"""Ops of com.microsoft and of miniort's own domain on the test double, against the CPU provider, node by node and in whole graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

import miniort_cpu.plugin
from miniort import InferenceSession, SessionOptions, create_plugin_manager, hookimpl
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort.runtime.comparison import difference, first_difference
from miniort.runtime.engines import SessionEngine
from miniort.types import dtype_to_onnx
from miniort_cuda.kernels import KERNELS
from miniort_cuda.provider import CUDAProvider

BATCH, TIME, PAST, HEADS, KV_HEADS, SIZE, WIDTH = 2, 3, 4, 4, 2, 8, 32


@pytest.fixture
def plugins(cupy: Any) -> PluginManager:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]

    manager = create_plugin_manager(points=[])
    manager.register(DoubleOfCuda())
    manager.register(miniort_cpu.plugin)
    return manager


def f(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def whole(*shape: int, high: int = 256, low: int = 0, dtype: Any = np.uint8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


Case = tuple[str, list[np.ndarray | None], dict[str, Any], int]

ANGLES = [f(16, SIZE // 2, seed=7), f(16, SIZE // 2, seed=8)]
PASTS = [f(BATCH, HEADS, PAST, SIZE, seed=5), f(BATCH, HEADS, PAST, SIZE, seed=6)]
KV_PASTS = [f(BATCH, KV_HEADS, PAST, SIZE, seed=5), f(BATCH, KV_HEADS, PAST, SIZE, seed=6)]
QKV = [f(BATCH, TIME, HEADS * SIZE, seed=seed) for seed in (1, 2, 3)]
GROUPED = [f(BATCH, TIME, HEADS * SIZE), f(BATCH, TIME, KV_HEADS * SIZE), f(BATCH, TIME, KV_HEADS * SIZE, seed=2)]
PACKED = f(BATCH, TIME, (HEADS + 2 * KV_HEADS) * SIZE)
GROUPS = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
SEQLENS = [i32(PAST + TIME - 1, PAST + TIME - 2), i32(PAST + TIME)]
NBITS = {"K": 40, "N": 6, "bits": 4, "block_size": 16}

CASES: dict[str, Case] = {
    "gelu": ("Gelu", [3 * f(2, 5)], {}, 1),
    "bias-gelu": ("BiasGelu", [3 * f(2, 5), f(5, seed=1)], {}, 1),
    "fast-gelu": ("FastGelu", [3 * f(2, 5), f(5, seed=1)], {}, 1),
    "fast-gelu-half": ("FastGelu", [f(2, 5, dtype=np.float16)], {}, 1),
    "quick-gelu": ("QuickGelu", [3 * f(2, 5)], {"alpha": 1.5}, 1),
    "trilu": ("Trilu", [f(2, 4, 5), np.array(1)], {"upper": 0}, 1),
    "gather-nd": ("GatherND", [f(3, 4, 5), np.array([[0, 1], [2, -1]])], {}, 1),
    "quantize": ("QuantizeLinear", [f(3, 4), np.float32(0.1), np.uint8(7)], {}, 1),
    "dequantize": ("DequantizeLinear", [whole(3, 4), np.float32(0.1), np.uint8(7)], {}, 1),
    "skip-norm": ("SkipLayerNormalization", [*QKV[:2], f(WIDTH), f(WIDTH, seed=1), f(WIDTH, seed=2)], {"epsilon": 1e-5}, 4),
    "skip-norm-one-output": ("SkipLayerNormalization", [*QKV[:2], f(WIDTH)], {}, 1),
    "skip-rms": ("SkipSimplifiedLayerNormalization", [*QKV[:2], f(WIDTH), f(WIDTH, seed=2)], {}, 4),
    "simplified-norm": ("SimplifiedLayerNormalization", [QKV[0], f(WIDTH)], {"epsilon": 1e-6}, 2),
    "embed-norm": (
        "EmbedLayerNormalization",
        [i32([1, 2, 0], [3, 1, 1]), i32([0, 1, 1], [0, 0, 1]), f(5, 6), f(4, 6, seed=1), f(2, 6, seed=2), f(6), f(6, seed=3),
         i32([1, 1, 0], [1, 1, 1])],
        {},
        3,
    ),
    "rotary": ("RotaryEmbedding", [f(BATCH, HEADS, TIME, SIZE), np.array([[0, 1, 2], [3, 4, 5]]), *ANGLES], {}, 1),
    "rotary-from-a-position": ("RotaryEmbedding", [QKV[0], np.array([4]), *ANGLES], {"interleaved": 1}, 1),
    "rotary-in-part": (
        "RotaryEmbedding",
        [QKV[0], np.array([[0, 1, 2], [3, 4, 5]]), ANGLES[0][:, :2], ANGLES[1][:, :2]],
        {"num_heads": HEADS, "rotary_embedding_dim": 4},
        1,
    ),
    "attention": (
        "Attention",
        [f(BATCH, TIME, WIDTH), f(WIDTH, 3 * WIDTH, seed=1) / 6, f(3 * WIDTH), i32([1] * 7, [0, 0] + [1] * 5), np.stack(PASTS)],
        {"num_heads": HEADS, "unidirectional": 1},
        2,
    ),
    "attention-ends": (
        "Attention",
        [f(BATCH, TIME, WIDTH), f(WIDTH, 3 * WIDTH, seed=1) / 6, f(3 * WIDTH), i32(2, 3)],
        {"num_heads": HEADS},
        1,
    ),
    "attention-of-integers": (
        "QAttention",
        [
            whole(BATCH, TIME, WIDTH),
            whole(WIDTH, 3 * WIDTH, low=-128, high=128, dtype=np.int8),
            f(3 * WIDTH),
            np.float32(0.02),
            np.float32(0.01),
            None,
            np.uint8(120),
            np.int8(3),
        ],
        {"num_heads": HEADS, "unidirectional": 1},
        1,
    ),
    "multi-head": ("MultiHeadAttention", [*QKV, f(3 * WIDTH), None, f(BATCH, HEADS, TIME, PAST + TIME), *PASTS], {"num_heads": HEADS}, 3),
    "multi-head-packed": ("MultiHeadAttention", [f(BATCH, TIME, HEADS, 3, SIZE)], {"num_heads": HEADS, "unidirectional": 1}, 1),
    "group-query": ("GroupQueryAttention", [*GROUPED, *KV_PASTS, *SEQLENS, *ANGLES], {**GROUPS, "do_rotary": 1}, 3),
    "group-query-packed": ("GroupQueryAttention", [PACKED, None, None, *KV_PASTS, *SEQLENS], {**GROUPS, "softcap": 5.0}, 3),
    "group-query-window": ("GroupQueryAttention", [*GROUPED, *KV_PASTS, *SEQLENS], {**GROUPS, "local_window_size": 3}, 3),
    "group-query-smooth": ("GroupQueryAttention", [*GROUPED, *KV_PASTS, *SEQLENS], {**GROUPS, "smooth_softmax": 1}, 3),
    "group-query-prompt": ("GroupQueryAttention", [*GROUPED, None, None, i32(2, 1), i32(3)], GROUPS, 3),
    "nbits": ("MatMulNBits", [f(2, 3, 40), whole(6, 3, 8), f(18)], NBITS, 1),
    "nbits-points": ("MatMulNBits", [f(2, 40), whole(6, 3, 8), f(18), whole(12)], {**NBITS, "accuracy_level": 4}, 1),
    "nbits-float-points": ("MatMulNBits", [f(2, 40), whole(6, 3, 8), f(18), f(18, seed=3), None, f(6)], NBITS, 1),
    "nbits-8": ("MatMulNBits", [f(1, 40), whole(6, 3, 16), f(18), whole(18)], {**NBITS, "bits": 8}, 1),
    "nbits-2": ("MatMulNBits", [f(1, 40), whole(6, 3, 4), f(18)], {**NBITS, "bits": 2}, 1),
    "gather-blocks": (
        "GatherBlockQuantized",
        [whole(5, 16), np.array([[0, 4], [2, 2]]), f(5, 2), whole(5, 1)],
        {"block_size": 16, "bits": 4, "quantize_axis": 1, "gather_axis": 0},
        1,
    ),
}  # fmt: skip

FUSED: dict[str, tuple[list[np.ndarray | None], dict[str, Any]]] = {
    "plain": ([f(1, 4, 5, 5), f(6, 4, 3, 3)], {"pads": [1, 1, 1, 1]}),
    "relu-and-addend": ([f(1, 4, 5, 5), f(6, 2, 3, 3), f(6), f(1, 6, 3, 3)], {"group": 2, "activation": "Relu"}),
    "normalized": (
        [f(1, 4, 5, 5), f(4, 1, 3, 3), None, None, f(4), f(4, seed=1), f(4, seed=2), abs(f(4, seed=3))],
        {"group": 4, "activation": "Clip", "activation_params": [0.0, 1.0], "epsilon": 1e-3},
    ),
    "swish": ([f(1, 4, 5, 5), f(6, 4, 1, 1)], {"activation": "Swish", "activation_params": [1.5], "strides": [2, 2]}),
    "hard-sigmoid": ([f(1, 4, 5, 5), f(6, 4, 1, 1)], {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]}),
}


def model_of(op: str, domain: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], outputs: int) -> tuple[Any, dict[str, Any]]:
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    feeds = {name: np.asarray(array) for name, array in zip(names, inputs, strict=True) if array is not None}
    infos = [helper.make_tensor_value_info(name, dtype_to_onnx(array.dtype), array.shape) for name, array in feeds.items()]
    results = ["" if (op, index) == ("SkipSimplifiedLayerNormalization", 1) else f"y{index}" for index in range(outputs)]
    node = helper.make_node(op, names, results, name="the_node", domain=domain, **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in results if name])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def expect_the_cpu_s_results(plugins: PluginManager, op: str, domain: str, *case: Any) -> None:
    model, feeds = model_of(op, domain, *case)
    ours = InferenceSession(model, SessionOptions("none"), providers=["cuda", "cpu"], plugins=plugins)
    assert [node.provider for node in ours.explain().nodes] == ["cuda"]
    theirs = InferenceSession(model, SessionOptions("none"), providers=["cpu"], plugins=plugins)
    for found, wanted in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
        assert found.dtype == wanted.dtype
        half = found.dtype == np.float16
        np.testing.assert_allclose(found, wanted, rtol=1e-2 if half else 1e-4, atol=1e-2 if half else 2e-5)


@pytest.mark.parametrize("name", CASES)
def test_one_node_gives_what_the_cpu_gives(name: str, plugins: PluginManager) -> None:
    op, inputs, attributes, outputs = CASES[name]
    expect_the_cpu_s_results(plugins, op, "com.microsoft", inputs, attributes, outputs)


@pytest.mark.parametrize("name", FUSED)
def test_fused_convolution(name: str, plugins: PluginManager) -> None:
    inputs, attributes = FUSED[name]
    expect_the_cpu_s_results(plugins, "FusedConv", "miniort", inputs, {"kernel_shape": inputs[1].shape[2:], **attributes}, 1)  # type: ignore[union-attr]


def test_every_op_of_com_microsoft_has_a_case() -> None:
    assert {kernel.op for kernel in KERNELS if kernel.domain == "com.microsoft"} == {case[0] for case in CASES.values()}


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("folder", ["llama_genai_int4_asym", "qwen2_genai_int4", "gpt2_ort_convert_int8"])
def test_whole_graphs(folder: str, level: str, data: Path, plugins: PluginManager) -> None:
    (path,) = (data / "fixtures" / folder).glob("*.onnx")
    weights = WeightStore()
    ours, theirs = (SessionEngine(path, name, level, ["cpu"], weights=weights, plugins=plugins) for name in ("cuda", "cpu"))
    feeds: dict[str, Any] = {}
    for each in ours.session.get_inputs():
        sizes = {"batch_size": 1, "sequence_length": 3, "past_sequence_length": 4, "total_sequence_length": 7, "kv_cache_dim": 16}
        shape = tuple(
            size if isinstance(size, int) else sizes.get(str(size), {"batch": 1, "past_seq_len": 4, "seq_len": 3}.get(str(size), 7))
            for size in each.shape
        )
        make: Callable[..., Any] = f if each.type == "tensor(float)" else lambda *s: np.ones(s, np.int64)
        feeds[each.name] = make(*shape).astype(np.int32 if each.type == "tensor(int32)" else make(*shape).dtype)
    for name, wanted in theirs.run(feeds).items():
        assert difference(ours.run(feeds)[name], wanted).passed, name
    assert first_difference(ours, theirs, feeds).divergence is None


def test_bfloat16_is_rounded_once_and_moved_unrounded(plugins: PluginManager) -> None:
    x, w = f(3, 4, dtype=ml_dtypes.bfloat16), f(4, 5, seed=1, dtype=ml_dtypes.bfloat16)
    for op, inputs in {"MatMul": [x, w], "Transpose": [x], "Softmax": [x], "Add": [x, x], "Sqrt": [abs(x)]}.items():
        model, feeds = model_of(op, "", inputs, {}, 1)
        del model.opset_import[1:]
        found = InferenceSession(model, SessionOptions("none"), providers=["cuda", "cpu"], plugins=plugins)
        assert [node.provider for node in found.explain().nodes] == ["cuda"]
        wanted = InferenceSession(model, SessionOptions("none"), providers=["cpu"], plugins=plugins).run(None, feeds)[0]
        got = found.run(None, feeds)[0]
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32), err_msg=op)
