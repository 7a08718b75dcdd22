"""Quantized decoders that real tools wrote, by the ops of com.microsoft: prompt and 40 greedy tokens as onnxruntime 1.32 gave them.

`ort_expected.npz` was recorded with that version on the CPU, for the very graph beside it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miniort import InferenceSession, SessionOptions

TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
HEAD_SIZE = 16

DECODERS = {
    "gpt2_ort_convert_int8": 1e-3,
    "llama_genai_int4_asym": 1e-3,
    "qwen2_genai_int4": 0.2,  # its activations are rounded to 8 bits: a tie may go either way, and is then seen in all that follows
}
"""Each decoder, and how far a logit may be off."""


class Decoder:
    """A session with its cache, fed with one chunk of tokens after the other."""

    def __init__(self, session):
        self.session, self.past, self.length = session, None, 0
        self.names = [each.name for each in session.get_outputs()]

    def feed(self, ids):
        """[1, N] token ids -> logits [1, N, vocabulary]."""
        end = self.length + ids.shape[1]
        known = {"input_ids": ids, "attention_mask": np.ones((1, end)), "position_ids": np.arange(self.length, end)[None]}
        feeds = {}
        for each in self.session.get_inputs():
            if each.name in known:
                feeds[each.name] = known[each.name].astype(TYPES[each.type])
            elif self.past is not None:
                feeds[each.name] = self.past[each.name]
            else:  # batch and past length are the axes without a size; a head size may have a name too
                *sizes, last = each.shape
                shape = [size if isinstance(size, int) else 1 if place == len(sizes) - 3 else 0 for place, size in enumerate(sizes)]
                feeds[each.name] = np.zeros((*shape, last if isinstance(last, int) else HEAD_SIZE), np.float32)
        logits, *presents = self.session.run(None, feeds)
        named = zip(self.names[1:], presents, strict=True)
        self.past = {name.replace("present.", "past_key_values.").replace("present_", "past_"): value for name, value in named}
        self.length = end
        return logits


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("name", list(DECODERS))
def test_decoder(name: str, level: str, data: Path, cpu_plugins):
    with np.load(data / "fixtures" / name / "ort_expected.npz") as file:
        expected = dict(file)
    with np.load(data / "fixtures" / "gpt2_optimum" / "reference.npz") as file:
        ids = file["input_ids"]  # the same for all of them
    options = SessionOptions(level, strict=True)
    decoder = Decoder(InferenceSession(data / "fixtures" / name / "model.onnx", options, ["cpu"], plugins=cpu_plugins))
    logits = decoder.feed(ids)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=DECODERS[name])
    for token, wanted in zip(expected["greedy_tokens"], expected["greedy_logits"], strict=True):
        np.testing.assert_allclose(logits[0, -1], wanted, rtol=0, atol=DECODERS[name])
        assert logits[0, -1].argmax() == token
        logits = decoder.feed(np.array([[token]]))
