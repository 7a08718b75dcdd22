"""Taking a decoder apart whose two graphs are the branches of one `If`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from miniort import InferenceSession
from miniort.errors import BindingError
from miniort.generation import open_decoder
from miniort.generation.merged import is_merged, take_branch
from miniort.model.loading import load_model
from miniort.plugins import PluginManager

MERGED = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 18]>
merged (int64[n] input_ids, float[2] past_0_key, bool[1] use_cache_branch) => (float[n] logits, float[2] present, float[2] again)
<float scale = {2.0}>
{
    one = Cast <to: int = 1> (input_ids)
    choice = Squeeze (use_cache_branch)
    logits, present, again = If (choice) <
        then_branch = step () => (float[n] a, float[2] b, float[2] c) { a = Mul (one, scale) b = Add (past_0_key, scale) c = Identity (b) },
        else_branch = prompt () => (float[n] d, float[2] start, float[2] start) <float[2] start = {5.0, 6.0}> { d = Add (one, one) }
    >
}
""")


@pytest.mark.parametrize("cached", [False, True])
def test_a_branch_computes_what_the_if_does(cached: bool) -> None:
    feeds = {"input_ids": np.array([1, 2, 3]), "past_0_key": np.array([7, 8], np.float32)}
    expected = InferenceSession(MERGED).run(None, {**feeds, "use_cache_branch": np.array([cached])})
    model = load_model(MERGED)
    assert is_merged(model)
    take_branch(model, cached)
    assert not is_merged(model)
    session = InferenceSession(model)
    wanted = [each.name for each in session.get_inputs()]
    assert wanted == (["input_ids", "past_0_key"] if cached else ["input_ids"])
    assert [each.name for each in session.get_outputs()] == ["logits", "present", "again"]
    for found, wanted_value in zip(session.run(None, {name: feeds[name] for name in wanted}), expected, strict=True):
        np.testing.assert_array_equal(found, wanted_value)


def test_the_input_that_chooses_may_be_named_by_the_user(data: Path, tmp_path: Path, plugins: PluginManager) -> None:
    model = onnx.load(data / "fixtures" / "gpt2_optimum_legacy" / "decoder_model_merged.onnx")
    next(value for value in model.graph.input if value.name == "use_cache_branch").name = "flag"
    next(node for node in model.graph.node if node.op_type == "If").input[0] = "flag"
    path = tmp_path / "merged.onnx"
    onnx.save(model, path)
    with pytest.raises(BindingError, match=r"input 'flag' tensor\(bool\).* is unknown to a decoder"):
        open_decoder(path, plugins=plugins)
    decoder = open_decoder(path, plugins=plugins, bindings={"use_cache_branch": "flag"})
    assert list(decoder.sessions) == ["prefill", "decode"]
    assert decoder.binding.layers == 3


def test_a_graph_without_such_a_choice_is_not_merged() -> None:
    plain = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]> plain (float[n] x) => (float[n] y) { y = Identity (x) }')
    assert not is_merged(load_model(plain))
