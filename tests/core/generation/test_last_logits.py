"""A prompt is given the logits of its last token alone, unless all are asked for, and both are the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.generation import Decoder, open_decoder
from miniort.generation.last_logits import FIRST_LOGIT_INPUT


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return open_decoder("demo")


def test_one_row_or_all(decoder: Decoder) -> None:
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
    mask = np.ones_like(tokens)
    cache = decoder.new_cache(batch=2)
    decoder.forward(tokens[:, :3], mask[:, :3], cache)
    cache.commit(3)
    every = decoder.forward(tokens[:, 3:], mask, cache, every_logit=True)
    last = decoder.forward(tokens[:, 3:], mask, cache)
    assert every.shape[:2] == (2, 5)
    assert last.shape[:2] == (2, 1)
    np.testing.assert_allclose(last[:, 0], every[:, -1], atol=1e-4)
    for row in range(3, 8):
        alone = decoder.uncached(tokens[:, : row + 1], mask[:, : row + 1])[:, -1]
        np.testing.assert_allclose(every[:, row - 3], alone, atol=1e-4)


def test_the_head_and_what_is_before_it_see_one_row(decoder: Decoder) -> None:
    session = decoder.sessions["decode"]
    assert FIRST_LOGIT_INPUT in [value.name for value in session.get_overridable_initializers()]
    narrowed = [
        node.name
        for node in session.model.graph
        if node.op_type == "Slice" and FIRST_LOGIT_INPUT in [each.name for each in node.inputs if each]
    ]
    assert narrowed
    head = next(node for node in session.model.graph if any(output.name == decoder.binding.decode.logits for output in node.outputs))
    assert head.inputs[0] is not None
    before = head.inputs[0].producer()
    assert before is not None
    assert before.op_type != "Slice"  # it was moved further up
