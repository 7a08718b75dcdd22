"""The fused ops of a decoder's block: their kernels beside formulas in float64, where they're made, and where they aren't."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

import miniort_cpu.plugin
import miniort_numba.plugin
from miniort import InferenceSession, SessionOptions, create_plugin_manager
from miniort.generation import open_decoder
from miniort_numba.compiled import finished_products, fused_rows, products
from miniort_numba.compiled.tiles import STRIP
from miniort_numba.team import Crew, hire

from .test_numba_conformance import plugins

NOTHING = np.empty(0, np.float32)
FUSED = {
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "FastGelu", "GemmFastGelu", "SwiGLU", "MatMulSwiGLU", "SplitHeads",
    "MatMulSplitHeads", "JoinedAttention",
}  # fmt: skip


@pytest.fixture(params=[1, 3], ids=lambda number: f"{number} threads")
def crew(request: pytest.FixtureRequest) -> Crew:
    return hire(request.param)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [(1, 1), (1, 768), (70, 515)])
@pytest.mark.parametrize("by_mean", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_normalized_sums(crew: Crew, size: tuple[int, int], by_mean: bool, biased: bool) -> None:
    x, skip, scale, shift = draw(*size), draw(*size)[::-1].copy(), draw(size[1]), draw(size[1] + 1)[1:]
    bias = draw(size[1] + 2)[2:] if biased else NOTHING
    total, y = np.full(size, np.nan, np.float32), np.full(size, np.nan, np.float32)
    shifted = shift if by_mean else NOTHING
    fused_rows.normalize_sum(crew.board, crew.helpers, fused_rows.SUM_ROWS, x, skip, bias, scale, shifted, by_mean, 1e-3, total, y)
    wanted = x.astype(float) + skip + (bias if biased else 0)
    np.testing.assert_allclose(total, wanted, atol=1e-6)
    if by_mean:
        wanted = (wanted - wanted.mean(1, keepdims=True)) / np.sqrt(wanted.var(1, keepdims=True) + 1e-3) * scale + shift
    else:
        wanted = wanted / np.sqrt((wanted**2).mean(1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (1, 3072), (50, 517)])
def test_gelu_with_a_bias_and_gates(crew: Crew, size: tuple[int, int]) -> None:
    x, bias = 3 * draw(*size), draw(size[1])
    wide = x.astype(float) + bias
    wanted = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    fused_rows.biased_gelu(crew.board, crew.helpers, fused_rows.BIASED_GELU_ROWS, x, bias, x)
    np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)
    both, y = draw(size[0], 2 * size[1]), np.full(size, np.nan, np.float32)
    gate, up = np.split(both.astype(float), 2, 1)
    fused_rows.gate_rows(crew.board, crew.helpers, fused_rows.GATED_ROWS, both, y)
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1, 1, (9, 3, 3), 64), (2, 37, (4, 1, 1), 10), (3, 5, (2, 2), 6)])
@pytest.mark.parametrize("angles", ["none", "all", "some", "one batch"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_split_heads(crew: Crew, sizes: tuple[int, int, Sequence[int], int], angles: str, interleaved: bool) -> None:
    batch, time, heads, dim = sizes
    x = draw(batch, time, sum(heads) * dim)
    bias = NOTHING if angles == "all" else draw(x.shape[2])
    count = {"none": 0, "some": dim // 2 - 1}.get(angles, dim // 2)
    rows = 1 if angles in ("none", "one batch") else batch
    cosines, sines = draw(rows, time, count), draw(rows, time, count)[::-1].copy()
    turned = [int(index < 2 and bool(count)) for index in range(len(heads))]
    y = np.full(x.size, np.nan, np.float32)
    table = np.array([heads, turned], np.int64).T.copy()
    fused_rows.split_heads(crew.board, crew.helpers, fused_rows.SPLIT_ROWS, x, bias, cosines, sines, table, dim, interleaved, y)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"], interleaved=int(interleaved), rotary_embedding_dim=2 * count)],
            "turn",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xcs"],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", 23)],
    )
    parts = np.split(x + (bias if bias.size else 0), np.cumsum(heads)[:-1] * dim, 2)
    start = 0
    for part, number, turn in zip(parts, heads, turned, strict=True):
        wanted = part.reshape(batch, time, number, dim).transpose(0, 2, 1, 3)
        if turn:
            shape = (batch, time, count)
            given = {"x": wanted, "c": np.broadcast_to(cosines, shape), "s": np.broadcast_to(sines, shape)}
            (wanted,) = ReferenceEvaluator(model).run(None, given)  # type: ignore[misc]
        np.testing.assert_allclose(y[start : start + wanted.size].reshape(wanted.shape), wanted, atol=1e-5)
        start += wanted.size
    assert start == y.size


@pytest.mark.parametrize("sizes", [(1, 1, (9, 3, 3), 64), (2, 37, (4, 1, 1), 10), (3, 90, (5, 5), 24), (1, 30, (3, 1, 1), 128)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_finished_on_the_way(crew: Crew, sizes: tuple[int, int, Sequence[int], int], biased: bool, turned: bool) -> None:
    batch, time, heads, dim = sizes
    a, b = draw(batch * time, 50), draw(50, sum(heads) * dim)
    shape = (batch, time, b.shape[1])
    bias = draw(b.shape[1] + 1)[1:] if biased else NOTHING
    cosines, sines = draw(1, time, dim // 2 if turned else 0), draw(1, time + 1, dim // 2 if turned else 0)[:, 1:].copy()
    told = bias, cosines, sines, np.array([heads, [int(turned)] * len(heads)], np.int64).T.copy(), dim, False
    ways = products.BY_ROWS, products.BY_STRIPS
    wanted, y = np.empty(a.shape[0] * b.shape[1], np.float32), np.full(a.shape[0] * b.shape[1], np.nan, np.float32)
    fused_rows.split_heads(crew.board, crew.helpers, fused_rows.SPLIT_ROWS, (a @ b).reshape(shape), *told, wanted)
    unit = lcm(dim, STRIP) // STRIP
    scratch = np.empty(shape, np.float32)
    finished_products.multiply_and_split_heads(
        crew.board, crew.helpers, *ways, finished_products.HEADS, a, b, unit, scratch, *told, y
    )  # fmt: skip
    np.testing.assert_allclose(y, wanted, atol=1e-4)
    if not biased and b.shape[1] % (2 * STRIP) == 0:
        gates, up = np.split(a.astype(float) @ b, 2, 1)
        result = np.full(up.shape, np.nan, np.float32)
        finished_products.multiply_and_gate(
            crew.board, crew.helpers, *ways, finished_products.GATE, a, b, scratch.reshape(-1, b.shape[1]), result
        )
        np.testing.assert_allclose(result, gates / (1 + np.exp(-gates)) * up, atol=1e-4)
    if biased and not turned:
        wide = a.astype(float) @ b + bias
        result = np.full(wide.shape, np.nan, np.float32)
        finished_products.multiply_and_gelu(crew.board, crew.helpers, *ways, finished_products.GELU, a, b, bias, result)
        np.testing.assert_allclose(result, wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))), atol=1e-4)


@pytest.mark.parametrize(
    ("folder", "made"),
    [  # legacy graphs have masks of floats, which the provider's attention doesn't take
        ("gpt2_optimum", FUSED - {"SkipSimplifiedLayerNormalization", "FastGelu", "SwiGLU", "MatMulSwiGLU", "SplitHeads"}),
        ("llama_optimum", FUSED - {"SkipLayerNormalization", "FastGelu", "GemmFastGelu", "SwiGLU", "SplitHeads"}),
    ],
)
def test_decoders_get_fused_blocks(folder: str, made: set[str], data: Path) -> None:
    decoder = open_decoder(data / "fixtures" / folder, providers=["numba", "cpu"], plugins=plugins())
    for session in decoder.sessions.values():
        ops = ops_of(session)
        assert made <= set(ops)
        assert "Attention" not in ops
        # The last layer's queries may be cut out before they're split, as only the last position's are computed.
        assert ops.count("MatMulSplitHeads") >= ops.count("CacheAppend") - 1
        assert {node.provider for node in session.explain().nodes if node.op.split(".")[-1] in FUSED} == {"numba"}
    plain = open_decoder(data / "fixtures" / folder, providers=["cpu"], plugins=plugins())
    assert not any(FUSED & set(ops_of(session)) for session in plain.sessions.values())


def ops_of(session: InferenceSession) -> list[str]:
    return sorted(node.op.split(".")[-1] for node in session.explain().nodes)


def session(text: str, level: str = "all", providers: Sequence[str] = ("numba", "cpu")) -> InferenceSession:
    manager = create_plugin_manager(points=[])
    for module in (miniort_numba.plugin, miniort_cpu.plugin):
        manager.register(module)
    model = parser.parse_model(f'<ir_version: 11, opset_import: ["": 24]> {text}')
    return InferenceSession(model, SessionOptions(level), providers=list(providers), plugins=manager)


SUM = """<float[6] bias = {1, 2, 3, 4, 5, 6}, float[6] scale = {1, 1, 2, 1, 1, 1}>"""
BLOCK = f"""test (float[2, T, 6] a, float[2, T, 6] b) => (float[2, T, 6] y, float[2, T, 6] z) {SUM} {{
    c = Add(b, bias) s = Add(a, c) y = LayerNormalization(s, scale, bias) {{tail}} }}"""
MLP = """test (float[2, T, 2] x) => (float[2, T, 3] y) <float[2, 3] w = {1, 2, 3, 4, -5, -6}, float[3] bias = {1, 2, 3}> {
    p = MatMul(x, w) s = Add(p, bias) GELU }"""
TANH = 'Gelu<approximate = "tanh">'
GLU = """test (float[2, T, 8] x) => (float[2, T, 4] y) <int64[2] sizes = {4, 4}> {
    a, b = Split<axis = -1>(x, sizes) g = Swish<alpha = ALPHA>(GATE) y = Mul(g, UP) }"""
HEADS = """test (float[2, T, 24] x, float[2, T, 1] c, float[2, T, 1] s) => (float[2, 2, T, 3] y, float[2, 4, T, 3] z, float[2, 2, T, 3] w)
    <int64[3] sizes = {6, 12, 6}, int64[4] two = {0, 0, 2, 3}, int64[4] four = {FOUR}, float[24] bias = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24}> {
    sum = Add(bias, x) q, k, v = Split<axis = 2>(sum, sizes) q4 = Reshape(q, two) k4 = Reshape(k, four) v4 = Reshape(v, two)
    qt = Transpose<perm = [0, 2, 1, 3]>(q4) kt = Transpose<perm = [0, 2, 1, 3]>(k4) vt = Transpose<perm = [PERM]>(v4)
    qr = RotaryEmbedding<rotary_embedding_dim = 2>(qt, c, s) kr = RotaryEmbedding<rotary_embedding_dim = 2, interleaved = ODD>(kt, c, s)
    y = Neg(qr) z = Neg(kr) w = Neg(vt) }"""


def heads(four: str = "0, -1, 4, 3", perm: str = "0, 2, 1, 3", odd: int = 0) -> str:
    return HEADS.replace("FOUR", four).replace("PERM", perm).replace("ODD", str(odd))


def projected(tail: str = "w = Neg(vt)") -> str:
    """`heads`, of a product with a matrix."""
    matrix = f"float[24, 24] matrix = {{{', '.join(str(number % 7 - 3) for number in range(24 * 24))}}}"
    text = heads().replace("<int64[3] sizes", f"<{matrix}, int64[3] sizes").replace("w = Neg(vt)", tail)
    return text.replace("sum = Add(bias, x)", "p = MatMul(x, matrix) sum = Add(bias, p)")


def glu(gate: str = "a", up: str = "b", alpha: str = "1.0") -> str:
    return GLU.replace("GATE", gate).replace("UP", up).replace("ALPHA", alpha)


def gated_product(size: int = 4) -> str:
    matrix = f"float[8, {2 * size}] matrix = {{{', '.join(str(number % 7 - 3) for number in range(16 * size))}}}"
    text = glu().replace("<int64[2] sizes = {4, 4}", f"<{matrix}, int64[2] sizes = {{{size}, {size}}}").replace("T, 4]", f"T, {size}]")
    return text.replace("Split<axis = -1>(x,", "Split<axis = -1>(p,").replace("a, b = ", "p = MatMul(x, matrix) a, b = ")


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (BLOCK.replace("{tail}", "z = Neg(s)"), ["SkipLayerNormalization", "Neg"]),
        (BLOCK.replace("{tail}", "z = Neg(b)"), ["SkipLayerNormalization", "Neg"]),
        (BLOCK.replace("{tail}", "z = Neg(c)"), ["Add", "SkipLayerNormalization", "Neg"]),
        (BLOCK.replace("{tail}", "z = RMSNormalization(s, scale)"), ["SkipLayerNormalization", "RMSNormalization"]),
        (
            BLOCK.replace(" s ", " z ").replace("(s, ", "(z, ").replace("{tail}", ""),
            ["Add", "Add", "LayerNormalization"],
        ),
        (MLP.replace("GELU", f"y = {TANH}(s)"), ["GemmFastGelu"]),
        (MLP.replace("GELU", f"g = {TANH}(s) y = Mul(g, p)"), ["MatMul", "FastGelu", "Mul"]),
        (MLP.replace("GELU", f"g = {TANH}(s) y = Mul(g, s)"), ["MatMul", "Add", "Gelu", "Mul"]),
        (glu(), ["SwiGLU"]),
        (gated_product(), ["MatMulSwiGLU"]),
        (gated_product(32), ["MatMulSwiGLU"]),
        (glu("b", "a"), ["Split", "Swish", "Mul"]),
        (glu(alpha="0.5"), ["Split", "Swish", "Mul"]),
        (glu("a", "a"), None),
        (heads(), ["SplitHeads", "Neg", "Neg", "Neg"]),
        (heads("0, 0, 4, 3"), ["SplitHeads", "Neg", "Neg", "Neg"]),
        (projected(), ["MatMulSplitHeads", "Neg", "Neg", "Neg"]),
        (projected("top = ReduceMax<keepdims = 0>(p) w = Add(vt, top)"), ["MatMul", "SplitHeads", "ReduceMax", "Neg", "Neg", "Add"]),
        (heads("2, -1, 4, 3"), None),
        (heads(odd=1), None),
    ],
)
def test_fused_graphs_give_what_plain_ones_give(text: str, ops: list[str] | None) -> None:
    fused, plain = session(text), session(text, "none", ["cpu"])
    if ops is None:
        assert not FUSED & set(ops_of(fused))
    else:
        assert ops_of(fused) == sorted(ops)
    rng = np.random.default_rng(0)
    for time in (1, 5, 40):
        feeds = {each.name: rng.standard_normal((2, time, each.shape[2])).astype(np.float32) for each in plain.get_inputs()}
        for one, other in zip(fused.run(None, feeds), plain.run(None, feeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", [BLOCK.replace("{tail}", "z = Neg(s)"), glu(), heads()])
def test_nothing_is_fused_for_other_providers_or_at_lower_levels(text: str) -> None:
    for made in (session(text, providers=["cpu"]), session(text, "extended")):
        assert not FUSED & set(ops_of(made))
