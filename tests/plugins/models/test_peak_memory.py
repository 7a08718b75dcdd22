"""What a long prompt takes of memory, beyond the weights and the cache. In a process of its own, whose peak nobody else raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miniort_models.conversion import convert
from miniort_models.weights.arrays import WeightArrays

LAYERS, WIDTH, VOCABULARY, TOKENS = 12, 256, 2000, 2048
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": LAYERS,
    "n_head": 4,
    "n_embd": WIDTH,
    "n_positions": TOKENS,
    "vocab_size": VOCABULARY,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
CACHE = 2 * 4 * LAYERS * WIDTH * TOKENS
"""Bytes: 50 MB. What one layer works on is some 30 MB. Keys and values of all layers, kept until the last one has run, would be 50 MB more,
the queries that they were computed with 25 MB."""

MEASURE = """
import sys
import numpy as np
from miniort import SessionOptions
from miniort.generation import Generator, open_decoder

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def run(decoder, tokens, capacity):
    generator = Generator(decoder, decoder.new_cache("static", max_length=capacity), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(np.arange(tokens)[None] % 2000)
    generator.step()

decoder = open_decoder(sys.argv[1], providers=["cpu"], options=SessionOptions(intra_op_num_threads=1))
run(decoder, 16, 16)  # from here on all weights and libraries are in memory
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is in memory now
for tokens in map(int, sys.argv[2:]):
    run(decoder, tokens, tokens)
print(status("VmHWM") - before)
"""


def weights() -> WeightArrays:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (TOKENS, WIDTH)}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    for layer in range(LAYERS):
        for name, shape in {
            "ln_1": (WIDTH,),
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "ln_2": (WIDTH,),
            "mlp.c_fc": (WIDTH, 4 * WIDTH),
            "mlp.c_proj": (4 * WIDTH, WIDTH),
        }.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    return WeightArrays("mid-size", CONFIG, {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peak") / "model"
    convert(weights(), folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak from a moment on")
@pytest.mark.parametrize("graphs", ["", "decode.onnx"], ids=["two graphs", "one graph"])
@pytest.mark.parametrize("lengths", [(TOKENS,), (256, 512, 1024, TOKENS)], ids=["one prompt", "longer and longer prompts"])
def test_a_long_prompt_takes_its_cache_and_a_layers_work(folder: Path, graphs: str, lengths: tuple[int, ...]) -> None:
    command = [sys.executable, "-c", MEASURE, str(folder / graphs), *map(str, lengths)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    beyond = int(found.stdout) - CACHE
    assert 0 < beyond < CACHE
