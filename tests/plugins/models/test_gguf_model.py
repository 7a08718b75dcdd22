"""A GGUF file from end to end: converted once, with tokenizer, template and end tokens, its weights kept as they're quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from miniort.errors import ModelError, TokenizerError
from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.types import Array
from miniort_models.gguf_model import write_gguf

TOKENS = ["<s>", "</s>", "<|eot_id|>", *(chr(byte) for byte in range(33, 127)), "Ġ", "Ċ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }}{{ eos_token }}{% endfor %}"

WriteModel = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModel:
    """`write_model(types, hidden=…)`: a random llama, each kind of its weights quantised as `types` says, float32 where it doesn't."""
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))

    def make(types: dict[str, str], hidden: int = 32, tokens: list[str] = TOKENS, pre: str = "gpt-2") -> Path:
        rng = np.random.default_rng(1)
        writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(hidden)
        writer.add_block_count(2)
        writer.add_feed_forward_length(hidden)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template(TEMPLATE)
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), hidden), "output_norm": (hidden,)}
        for layer in range(2):
            for part, rows in {"q": hidden, "k": hidden // 2, "v": hidden // 2, "output": hidden}.items():
                shapes[f"blk.{layer}.attn_{part}"] = (rows, hidden)
            shapes |= {f"blk.{layer}.ffn_{part}": (hidden, hidden) for part in ("gate", "up", "down")}
            shapes |= {f"blk.{layer}.{part}_norm": (hidden,) for part in ("attn", "ffn")}
        for name, shape in shapes.items():
            kind = types.get(name.rsplit(".", 1)[-1])
            if kind is None:
                writer.add_tensor(f"{name}.weight", (rng.normal(size=shape) * 0.2 + ("norm" in name)).astype(np.float32))
            else:
                quantised = random_blocks(GGMLQuantizationType[kind], shape, rng)
                writer.add_tensor(f"{name}.weight", quantised, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "tiny.gguf"

    return make


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random numbers with scales that make weights of about 0.2."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scale = {"Q8_0": 0.002, "Q4_0": 0.03, "Q4_1": 0.03, "Q4_K": 0.0008, "Q5_K": 0.0004, "Q6_K": 0.0001}[kind.name]
    least = {"Q4_1": -0.2, "Q4_K": 0.005, "Q5_K": 0.005}.get(kind.name)
    for at, value in ((208 if kind.name == "Q6_K" else 0, scale), (2, least)):
        if value is not None:
            raw[..., at : at + 2] = (value * rng.uniform(0.5, 1.5, raw.shape[:2])).astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def logits(decoder: Decoder) -> Array:
    tokens = np.random.default_rng(2).integers(0, len(TOKENS), (1, 12))
    try:
        return decoder.uncached(tokens, np.ones_like(tokens))
    finally:
        decoder.close()


@pytest.mark.parametrize(
    ("types", "hidden"),
    [
        (dict.fromkeys(("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q8_0"), 32),
        ({"token_embd": "Q4_0", "attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_down": "Q4_0"}, 64),
        ({"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q5_K", "ffn_down": "Q5_K"}, 256),
        ({"token_embd": "Q4_K", "attn_output": "Q4_K", "ffn_gate": "Q4_K", "ffn_up": "Q4_K"}, 256),
    ],
    ids=["Q8_0", "Q4_0 and Q4_1", "Q4_K_M", "an embedding with zero points"],
)
def test_kept_as_quantised_is_as_dequantised(write_model: WriteModel, tmp_path: Path, types: dict[str, str], hidden: int) -> None:
    path = write_model(types, hidden)
    write_gguf(path, tmp_path / "float", dtype="f32")
    decoder = open_decoder(path)
    graph = onnx.load(decoder.source.graphs[0], load_external_data=False).graph
    assert any(node.op_type == "MatMulNBits" for node in graph.node)
    kept, wanted = logits(decoder), logits(open_decoder(tmp_path / "float"))
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(kept, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_all_that_the_file_says_is_known(write_model: WriteModel) -> None:
    decoder = open_decoder(write_model({}))
    assert (decoder.source.name, decoder.context_length) == ("tiny.gguf", 64)
    assert (decoder.source.begin_token, decoder.source.end_tokens) == (0, {1, 2})
    tokenizer = decoder.open_tokenizer()
    assert tokenizer.encode("the the") == [0, TOKENS.index("the"), TOKENS.index("Ġthe")]
    text = decoder.open_chat_template().render([{"role": "user", "content": "hi"}])
    assert text == "<s>user:hi</s>"
    generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler())
    generator.append_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert len(list(generate(generator, 5))) > 0
    decoder.close()


def test_it_is_converted_once(write_model: WriteModel) -> None:
    path = write_model({})
    first = open_decoder(path).source.graphs
    written = [graph.stat().st_mtime_ns for graph in first]
    second = open_decoder(path).source.graphs
    assert second == first
    assert [graph.stat().st_mtime_ns for graph in second] == written


def test_a_tokenizer_that_is_not_known_is_missed_when_a_text_comes(write_model: WriteModel) -> None:
    decoder = open_decoder(write_model({}, pre="klingon"))
    assert logits(decoder).shape[-1] == len(TOKENS)
    with pytest.raises(TokenizerError, match=r"tiny\.gguf has a tokenizer that splits a text as 'klingon' does"):
        decoder.open_tokenizer()


def test_a_tokenizer_with_more_tokens_than_the_model_knows(write_model: WriteModel) -> None:
    decoder = open_decoder(write_model({}, tokens=[*TOKENS, "Ġmore"]))
    with pytest.raises(TokenizerError, match=f"the tokenizer has {len(TOKENS) + 1} tokens and the model knows {len(TOKENS)}"):
        decoder.open_tokenizer()
    decoder.close()


def test_nothing_is_left_of_a_file_that_cannot_be_converted(write_model: WriteModel, tmp_path: Path) -> None:
    path = write_model({})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is cut short"):
        open_decoder(path)
    assert not list((tmp_path / "cache").rglob("*.onnx"))
    assert not list((tmp_path / "cache").rglob("*.bin"))
    with pytest.raises(ModelError, match=r"no such file or folder: .*none\.gguf"):
        open_decoder(tmp_path / "none.gguf")
