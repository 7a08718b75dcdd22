"""Real models give what onnxruntime gives: 1e-3 apart at most in float32, and the same decisions where they are quantized."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

from miniort import InferenceSession


def _catalogue() -> ModuleType:
    """The models of the benchmark, so that what is measured is what is tested."""
    path = Path(__file__).parents[2] / "benchmarks" / "vision_models.py"
    spec = importlib.util.spec_from_file_location("vision_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vision_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MODELS = _catalogue().MODELS
SLOW_LIGHT = {"light_vgg19"}
"""Of the models in the onnx package those that take more than a few seconds."""


def _is_slow(name: str) -> bool:
    return MODELS[name].wheel is not None or name in SLOW_LIGHT


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a part of what was wanted; of numbers near zero, as a part of the output's mean magnitude.

    Below 0.001 only the difference itself counts: a map of probabilities may be all zeros but for what rounding leaves.
    """
    scale = np.maximum(np.maximum(np.abs(want), np.abs(want).mean()), 1e-3)
    return float((np.abs(got - want) / scale).max(initial=0))


def plain(path: Path) -> bytes:
    """The model, without a Softmax at its end.

    Weights of `light` models are made up, and their logits billions: one that's rounded the other way is a thousand above the rest, and
    takes all of the probability.
    """
    model = onnx.load(path)
    last = model.graph.node[-1]
    if last.op_type == "Softmax" and [output.name for output in model.graph.output] == list(last.output):
        model.graph.output[0].name = last.input[0]
        model.graph.output[0].type.tensor_type.ClearField("shape")
        del model.graph.node[-1]
    return model.SerializeToString()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if _is_slow(name) else name for name in MODELS])
def test_real_model(name):
    model = MODELS[name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    source = plain(model.path()) if model.wheel is None else str(model.path())
    reference = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    session = InferenceSession(source, providers=["cpu"])
    for seed in range(1 if model.wheel is None else 3):
        feed = model.feed(np.random.default_rng(seed))
        for info, got, want in zip(session.get_outputs(), session.run(None, feed), reference.run(None, feed), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), info.name
            if got.dtype.kind in "iub":
                np.testing.assert_array_equal(got, want, err_msg=info.name)
            elif model.quantized:  # one rounding that falls the other way moves what follows: the classes decided on must be the same
                np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1), err_msg=info.name)
            else:
                assert np.isfinite(got).all()
                assert relative_error(got, want) <= 1e-3, info.name
