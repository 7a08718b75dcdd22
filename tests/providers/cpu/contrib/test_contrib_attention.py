"""Attention of com.microsoft against onnxruntime, over the ways in which its inputs may be packed, masked and cached."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

INT32 = np.int32
HEADS, SIZE, WIDE = 4, 8, 16


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


MASKS = {
    "none": None,
    "ends": np.array([5, 3], INT32),
    "ends and starts": np.array([5, 4, 0, 1], INT32),
    "of keys": np.array([[1] * 5, [0, 0, 1, 1, 1]], INT32),
    "of queries and keys": (np.arange(2 * 5 * 5).reshape(2, 5, 5) % 4 > 0).astype(INT32),
}


class TestAttention:
    @pytest.mark.parametrize("unidirectional", [0, 1])
    @pytest.mark.parametrize("mask", list(MASKS))
    def test_masks(self, mask, unidirectional, agree):
        inputs = [floats(2, 5, 12), floats(12, 96, seed=1), floats(96, seed=2), MASKS[mask]]
        agree("Attention", inputs, 2, num_heads=HEADS, unidirectional=unidirectional)
        agree("Attention", inputs, 2, num_heads=HEADS, unidirectional=unidirectional, mask_filter_value=-1e5, scale=0.3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_past(self, count, agree):
        mask = np.ones((2, 4 + count), INT32)
        mask[1, :2] = 0
        for given in (None, mask):
            inputs = [floats(2, count, 12), floats(12, 96, seed=1), floats(96, seed=2), given, floats(2, 2, HEADS, 4, SIZE, seed=3)]
            agree("Attention", inputs, 2, num_heads=HEADS, unidirectional=1)

    @pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), (2, HEADS)])
    def test_attention_bias(self, shape, agree):
        inputs = [floats(2, 5, 12), floats(12, 96, seed=1), floats(96, seed=2), None, None, floats(*shape, 5, 5, seed=4)]
        agree("Attention", inputs, num_heads=HEADS)

    def test_empty_past(self, agree):
        inputs = [floats(2, 3, 12), floats(12, 96, seed=1), floats(96, seed=2), None, np.zeros((2, 2, HEADS, 0, SIZE), np.float32)]
        agree("Attention", inputs, 2, num_heads=HEADS, unidirectional=1)

    def test_values_of_another_size(self, agree):
        inputs = [floats(2, 5, 12), floats(12, 32 + 32 + 24, seed=1), floats(88, seed=2)]
        agree("Attention", inputs, 1, num_heads=HEADS, qkv_hidden_sizes=[32, 32, 24])

    def test_no_bias_and_constant_weight(self, agree):
        agree("Attention", [floats(2, 5, 12), floats(12, 96, seed=1)], 1, [1], num_heads=HEADS)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_floats(self, dtype, contrib):
        """onnxruntime has no such kernel on the CPU; float32 of the same numbers does."""
        inputs = [floats(2, 5, 12).astype(dtype), (floats(12, 96, seed=1) / 4).astype(dtype), floats(96, seed=2).astype(dtype)]
        got = contrib("Attention", inputs, 2, num_heads=HEADS).run()
        want = contrib("Attention", [x.astype(np.float32) for x in inputs], 2, num_heads=HEADS).onnxruntime()
        for found, wanted in zip(got, want, strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found.astype(np.float32), wanted, atol=0.03)

    def test_rotation_is_refused(self, contrib):
        with pytest.raises(Exception, match="do_rotary"):
            contrib("Attention", [floats(2, 5, 12), floats(12, 96)], num_heads=HEADS, do_rotary=1).run()


@pytest.mark.parametrize("weight_type", [np.int8, np.uint8])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
def test_quantized_attention(weight_type, per_column, with_past, agree):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (2, 3, 12)).astype(np.uint8)
    limits = np.iinfo(weight_type)
    weight = generator.integers(limits.min, limits.max, (12, 96)).astype(weight_type)
    scale = np.asarray(generator.random(96 if per_column else ()) * 1e-3 + 1e-3).astype(np.float32)
    zero_point = np.full(96 if per_column else (), 3, weight_type)
    past = floats(2, 2, HEADS, 4, SIZE) if with_past else None
    mask = np.ones((2, 7 if with_past else 3), INT32)
    mask[0, 0] = 0
    inputs = [x, weight, floats(96), np.array(0.02, np.float32), scale, mask, np.array(120, np.uint8), zero_point, past]
    for constants in ((), (1, 4, 7)):
        agree("QAttention", inputs, 2, constants, num_heads=HEADS, unidirectional=1)


class TestMultiHeadAttention:
    @pytest.mark.parametrize("unidirectional", [0, 1])
    @pytest.mark.parametrize("biased", [False, True])
    def test_separate(self, biased, unidirectional, agree):
        bias = floats(96, seed=9) if biased else None
        inputs = [floats(2, 5, 32), floats(2, 5, 32, seed=1), floats(2, 5, 32, seed=2), bias]
        agree("MultiHeadAttention", inputs, 3, num_heads=HEADS, unidirectional=unidirectional)

    def test_cross_attention_with_values_of_another_size(self, agree):
        inputs = [floats(2, 3, 32), floats(2, 5, 32, seed=1), floats(2, 5, 24, seed=2), floats(88, seed=3)]
        agree("MultiHeadAttention", inputs, num_heads=HEADS)

    def test_packed(self, contrib):
        """onnxruntime's CPU kernel takes no packed inputs: they must give what they give unpacked."""
        packed = floats(2, 5, HEADS, 3, SIZE)
        q, k, v = (np.ascontiguousarray(packed[:, :, :, place]).reshape(2, 5, 32) for place in range(3))
        want = contrib("MultiHeadAttention", [q, k, v], num_heads=HEADS).onnxruntime()[0]
        for inputs in ([packed], [q, np.ascontiguousarray(packed[:, :, :, 1:])]):
            np.testing.assert_allclose(contrib("MultiHeadAttention", inputs, num_heads=HEADS).run()[0], want, rtol=1e-5, atol=1e-6)

    def test_keys_that_are_split_already(self, agree):
        inputs = [floats(2, 3, 32), floats(2, HEADS, 5, SIZE, seed=1), floats(2, HEADS, 5, SIZE, seed=2)]
        agree("MultiHeadAttention", inputs, num_heads=HEADS)

    @pytest.mark.parametrize("mask", ["ends", "of keys", "of queries and keys"])
    def test_masks(self, mask, agree):
        inputs = [floats(2, 5, 32), floats(2, 5, 32, seed=1), floats(2, 5, 32, seed=2), None, MASKS[mask]]
        agree("MultiHeadAttention", inputs, num_heads=HEADS)

    @pytest.mark.parametrize("count", [1, 3])
    def test_past_and_attention_bias(self, count, agree):
        past = floats(2, HEADS, 4, SIZE, seed=3), floats(2, HEADS, 4, SIZE, seed=4)
        mask = np.ones((2, 4 + count), INT32)
        mask[0, :2] = 0
        for shape in ((1, 1), (1, HEADS), (2, HEADS)):
            bias = floats(*shape, count, 4 + count, seed=5)
            inputs = [floats(2, count, 32), floats(2, count, 32, seed=1), floats(2, count, 32, seed=2), None, mask, bias, *past]
            agree("MultiHeadAttention", inputs, 3, num_heads=HEADS, unidirectional=1)

    def test_scores(self, agree):
        inputs = [floats(2, 5, 32), floats(2, 5, 32, seed=1), floats(2, 5, 32, seed=2)]
        agree("MultiHeadAttention", inputs, [np.float32, None, None, np.float32], num_heads=HEADS, scale=0.7)


class TestRotaryEmbedding:
    @pytest.mark.parametrize("interleaved", [0, 1])
    @pytest.mark.parametrize("rank", [3, 4])
    def test_whole_heads(self, rank, interleaved, agree):
        x = floats(2, 3, 32) if rank == 3 else floats(2, HEADS, 3, SIZE)
        caches = floats(10, SIZE // 2, seed=1), floats(10, SIZE // 2, seed=2)
        for positions in (np.array([4]), np.array([[0, 1, 2], [5, 6, 7]])):
            agree("RotaryEmbedding", [x, positions, *caches], interleaved=interleaved)

    @pytest.mark.parametrize("interleaved", [0, 1])
    def test_part_of_each_head(self, interleaved, agree):
        caches = floats(10, 2, seed=1), floats(10, 2, seed=2)
        inputs = [floats(2, 3, 32), np.array([[0, 1, 2], [5, 6, 7]]), *caches]
        agree("RotaryEmbedding", inputs, interleaved=interleaved, rotary_embedding_dim=4, num_heads=HEADS)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_floats(self, dtype, contrib):
        inputs = [floats(2, 3, 32).astype(dtype), np.array([4]), floats(10, 4).astype(dtype), floats(10, 4, seed=1).astype(dtype)]
        got = contrib("RotaryEmbedding", inputs).run()[0]
        wide = [x.astype(np.float32) if x.dtype == dtype else x for x in inputs]
        want = contrib("RotaryEmbedding", wide).onnxruntime()[0]
        np.testing.assert_array_equal(got, want.astype(dtype))


class TestGroupQueryAttention:
    """4 heads over 2 key heads of size 16. `seqlens` is each row's keys less 1; `total` is the longest row's count."""

    def inputs(self, batch, count, lengths, past, *, packed=False, rotary=WIDE, bias=None, sink=None, positions=None):
        q, k, v = floats(batch, count, 64), floats(batch, count, 32, seed=1), floats(batch, count, 32, seed=2)
        parts = [np.concatenate((q, k, v), 2), None, None] if packed else [q, k, v]
        caches = [floats(batch, 2, past, WIDE, seed=3), floats(batch, 2, past, WIDE, seed=4)] if past is not None else [None, None]
        angles = [floats(32, rotary // 2, seed=5), floats(32, rotary // 2, seed=6)] if rotary else [None, None]
        seqlens = np.array(lengths, INT32) - 1
        return [*parts, *caches, seqlens, np.array(max(lengths), INT32), *angles, positions, bias, sink]

    def agree(self, contrib, inputs, outputs=3, new=None, **attributes):
        """Everything but what belongs to no token: rows of the output past their own tokens, and of the cache past their length."""
        attributes = {"num_heads": HEADS, "kv_num_heads": 2, "do_rotary": int(inputs[7] is not None), **attributes}
        made = contrib("GroupQueryAttention", inputs, outputs, **attributes)
        got, want = made.run(), made.onnxruntime()
        lengths = inputs[5] + 1
        new = np.minimum(inputs[0].shape[1], lengths) if new is None else new
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(got[0][row, : new[row]], want[0][row, : new[row]], rtol=1e-4, atol=1e-5)
            for found, wanted in zip(got[1:3], want[1:3], strict=True):
                assert found.shape == wanted.shape
                np.testing.assert_allclose(found[row, :, :length], wanted[row, :, :length], rtol=1e-5, atol=1e-6)
        return got, want

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("rotary", [0, WIDE])
    @pytest.mark.parametrize("interleaved", [0, 1])
    def test_prompt(self, packed, rotary, interleaved, contrib):
        for past in (None, 0):
            inputs = self.inputs(2, 5, [5, 5], past, packed=packed, rotary=rotary)
            self.agree(contrib, inputs, rotary_interleaved=interleaved)

    def test_right_padded_prompt(self, contrib):
        self.agree(contrib, self.inputs(2, 5, [5, 3], 0))
        self.agree(contrib, self.inputs(3, 5, [2, 5, 1], 8, packed=True))

    def test_growing_cache(self, contrib):
        self.agree(contrib, self.inputs(2, 1, [5, 5], 4))
        self.agree(contrib, self.inputs(1, 3, [7], 4, packed=True))
        self.agree(contrib, self.inputs(2, 1, [5, 3], 4))

    def test_buffer_with_room(self, contrib):
        self.agree(contrib, self.inputs(2, 1, [5, 3], 16))
        self.agree(contrib, self.inputs(1, 3, [7], 16))

    @pytest.mark.parametrize("window", [1, 2, 3, 10])
    def test_window(self, window, contrib):
        self.agree(contrib, self.inputs(2, 6, [6, 6], 0), local_window_size=window)
        self.agree(contrib, self.inputs(2, 1, [9, 5], 16), local_window_size=window)

    def test_soft_cap_scale_and_bias(self, contrib):
        self.agree(contrib, self.inputs(2, 5, [5, 5], 0), softcap=0.5, scale=0.9)
        for shape in ((1, 1), (2, HEADS)):
            self.agree(contrib, self.inputs(2, 5, [5, 5], 0, bias=floats(*shape, 5, 5, seed=7)), softcap=0.5)

    def test_smooth_softmax_and_sinks(self, contrib):
        self.agree(contrib, self.inputs(2, 5, [5, 5], 0), smooth_softmax=1)
        self.agree(contrib, self.inputs(2, 5, [5, 5], 0, sink=floats(HEADS, seed=8)))

    def test_partial_rotation_and_positions(self, contrib):
        self.agree(contrib, self.inputs(2, 1, [5, 5], 4, positions=np.array([[7], [9]])))

    def test_bidirectional(self, contrib):
        self.agree(contrib, self.inputs(2, 5, [5, 5], None), causal=0)

    def test_query_lengths(self, contrib):
        inputs = self.inputs(2, 3, [6, 4], 16)
        inputs[6] = np.array(16, INT32)
        own = np.array([3, 1], INT32)
        self.agree(contrib, [*inputs, None, None, None, None, own], new=own)

    @pytest.mark.parametrize("output", [1, 2])
    def test_scores(self, output, contrib):
        got, want = self.agree(contrib, self.inputs(2, 5, [5, 5], None), 4, qk_output=output)
        seen = np.tril(np.ones((5, 5), bool))
        np.testing.assert_allclose(got[3][:, :, seen], want[3][:, :, seen], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_floats(self, dtype, contrib):
        inputs = self.inputs(2, 3, [6, 4], 16, packed=True)
        narrow = [x.astype(dtype) if x is not None and x.dtype == np.float32 else x for x in inputs]
        wide = [x.astype(np.float32) if x is not None and x.dtype == dtype else x for x in narrow]
        attributes = {"num_heads": HEADS, "kv_num_heads": 2, "do_rotary": 1}
        got = contrib("GroupQueryAttention", narrow, 3, **attributes).run()
        want = contrib("GroupQueryAttention", wide, 3, **attributes).run()
        assert [each.dtype for each in got] == [dtype] * 3
        np.testing.assert_allclose(got[0].astype(np.float32), want[0], atol=0.05)

    def test_normalized_heads(self, contrib):
        """No kernel of onnxruntime for the CPU takes them: the same by hand, before a call without them."""
        inputs = self.inputs(2, 3, [3, 3], 0, rotary=0)
        weights = floats(WIDE, seed=11), floats(WIDE, seed=12)
        attributes = {"num_heads": HEADS, "kv_num_heads": 2, "qk_norm_epsilon": 1e-3}
        got = contrib("GroupQueryAttention", [*inputs, None, None, *weights], 1, **attributes).run()[0]
        by_hand = list(inputs)
        for place, (heads, weight) in enumerate(zip((HEADS, 2), weights, strict=True)):
            x = inputs[place].reshape(2, 3, heads, WIDE)
            by_hand[place] = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * weight).reshape(inputs[place].shape).astype(np.float32)
        want = contrib("GroupQueryAttention", by_hand, 1, num_heads=HEADS, kv_num_heads=2).onnxruntime()[0]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    def test_quantized_cache_is_refused(self, contrib):
        with pytest.raises(Exception, match="k_quant_type"):
            contrib("GroupQueryAttention", self.inputs(2, 3, [3, 3], 0), num_heads=HEADS, kv_num_heads=2, k_quant_type="PER_TENSOR").run()
