"""`miniort pull` from a local hub, and generating by the model's name afterwards, without any network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import safetensors.numpy
from click.testing import Result

Miniort = Callable[..., Result]

COMMAND = [sys.executable, "-c", "from miniort_cli.main import main; main()"]


def tokenizer_of_words(size: int) -> bytes:
    """A tokenizer.json whose token number 5 is the word `t5`."""
    vocabulary = {f"t{token}": token for token in range(size)}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        }
    ).encode()


def as_words(tokens: Any) -> str:
    return " ".join(f"t{token}" for token in np.ravel(tokens))


@pytest.fixture(scope="module")
def gpt2(data: Path) -> dict[str, bytes]:
    folder = data / "huggingface_gpt2"
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    return {
        **files,
        "tokenizer.json": tokenizer_of_words(128),
        "pytorch_model.bin": b"a pickle",
        "tf_model.h5": b"of no use",
        "onnx/model.onnx": b"of no use either",
    }


@pytest.fixture(scope="module")
def llama_weights(data: Path) -> dict[str, Any]:
    """The weights of an ONNX fixture, under the names that transformers gives them."""
    graph = onnx.load(data / "fixtures" / "llama_optimum" / "model.onnx").graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    weights = {name: weight for name, weight in stored.items() if name.startswith("model.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            layer = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{layer}.weight"] = np.ascontiguousarray(stored[node.input[1]].T)
    return weights


@pytest.fixture(scope="module")
def llama(data: Path, llama_weights: dict[str, Any]) -> dict[str, bytes]:
    """Safetensors in two files, and their index."""
    folder = data / "fixtures" / "llama_optimum"
    names = sorted(llama_weights)
    shards = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    index = {"metadata": {}, "weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    return {
        "config.json": (folder / "config.json").read_bytes(),
        "generation_config.json": (folder / "generation_config.json").read_bytes(),
        "tokenizer.json": tokenizer_of_words(512),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{shard: safetensors.numpy.save({name: llama_weights[name] for name in inside}) for shard, inside in shards.items()},
        "consolidated.safetensors": b"the same once more, in another layout",
    }


@pytest.fixture
def llama_gguf(data: Path, llama_weights: dict[str, Any], tmp_path: Path) -> bytes:
    """The same as GGUF, without a tokenizer."""
    config = json.loads((data / "fixtures" / "llama_optimum" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in llama_weights.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp has the halves that are rotated together side by side
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (tmp_path / "llama.gguf").read_bytes()


def run(*arguments: str, **environment: str) -> str:
    """What the command, in a process of its own, prints on standard output; it must not fail, or print anything else."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def error_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("miniort: error: ")
    return line.removeprefix("miniort: error: ")


# --------------------------------------------------------------------------------------- from the hub to the tokens


def test_gpt2_from_the_hub_to_its_logits(
    hub: Any, gpt2: dict[str, bytes], data: Path, generate_json: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("tiny/gpt2", gpt2).revisions["main"].commit
    first, second = run("pull", "tiny/gpt2").splitlines()
    assert first.startswith("tiny/gpt2 is here: ")
    assert first.endswith(f"main ({commit[:12]}) of {hub.endpoint}")
    assert second == "use it with --model tiny/gpt2"
    assert not [path for path in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx") if hub.of_file(path)]

    before = len(hub.requests)
    with np.load(data / "huggingface_gpt2" / "reference.npz") as file:
        prompt, logits = as_words(file["input_ids"]), file["logits"][0, -1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = generate_json(prompt, "--model", "tiny/gpt2", "--max-new-tokens", "1", "--top-k-print", "128")
    assert result["model"] == "tiny/gpt2"
    found = {each["id"]: each["logit"] for each in result["top_k"][0]}
    np.testing.assert_allclose([found[token] for token in range(128)], logits, atol=1e-4, rtol=0)
    assert len(hub.requests) == before


def test_llama_from_the_hub_to_its_tokens(hub: Any, llama: dict[str, bytes], data: Path) -> None:
    hub.add("tiny/llama", llama)
    run("pull", "tiny/llama")
    assert len(hub.of_file("model-00001-of-00002.safetensors")) == 1
    assert not hub.of_file("consolidated.safetensors")
    with np.load(data / "fixtures" / "llama_optimum" / "reference.npz") as file:
        prompt, tokens = as_words(file["input_ids"]), file["greedy_tokens"].tolist()
    before = len(hub.requests)
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    result = json.loads(run("generate", prompt, "--model", "tiny/llama", "--json", "--max-new-tokens", "40", **offline))
    assert result["tokens"] == tokens
    assert len(hub.requests) == before


def test_onnx_from_the_hub_to_its_tokens(hub: Any, data: Path, miniort: Miniort, generate_json: Callable[..., Any], tmp_path: Path) -> None:
    """Graphs stay as they are, behind the links of the hub's cache, with their external data."""
    folder = data / "fixtures" / "gpt2_optimum"
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data")
    files = {f"onnx/{name}": (tmp_path / name).read_bytes() for name in ("model.onnx", "model.onnx_data")}
    hub.add("tiny/onnx", {**files, "onnx/model_fp16.onnx": b"another", "tokenizer.json": tokenizer_of_words(512)})
    assert miniort("pull", "tiny/onnx").exit_code == 0
    assert not hub.of_file("onnx/model_fp16.onnx")
    with np.load(folder / "reference.npz") as file:
        prompt, tokens = as_words(file["input_ids"]), file["greedy_tokens"].tolist()
    assert generate_json(prompt, "--model", "tiny/onnx", "--max-new-tokens", "40")["tokens"] == tokens


@pytest.mark.parametrize("options", [["--onnx"], ["--file", "onnx/model.onnx"]], ids=str)
def test_the_graphs_of_a_repository_that_has_safetensors_too(
    hub: Any, gpt2: dict[str, bytes], data: Path, miniort: Miniort, options: list[str]
) -> None:
    folder = data / "fixtures" / "gpt2_optimum"
    files = {"onnx/model.onnx": folder / "model.onnx", "config.json": folder / "config.json"}
    graphs = {path: file.read_bytes() for path, file in files.items()}
    hub.add("tiny/both", {**gpt2, **graphs, "tokenizer.json": tokenizer_of_words(512)})
    assert miniort("pull", "tiny/both", *options).exit_code == 0
    assert not hub.of_file("model.safetensors")
    assert len(hub.of_file("onnx/model.onnx")) == 1
    assert miniort("generate", "t1 t2", "--model", "tiny/both", "--max-new-tokens", "1").exit_code == 0


def test_gguf_from_the_hub_to_its_tokens(
    hub: Any, llama_gguf: bytes, data: Path, miniort: Miniort, generate_json: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    hub.add("tiny/llama-GGUF", {"llama-F32.gguf": llama_gguf, "llama-Q8_0.gguf": b"GGUF", "README.md": b"# Which one?"})
    line = error_line(miniort("pull", "tiny/llama-GGUF"))
    assert f"llama-F32.gguf ({len(llama_gguf) / 1000:.0f} kB), llama-Q8_0.gguf (4 bytes); choose one with --file" in line
    assert miniort("pull", "tiny/llama-GGUF", "--file", "f32").exit_code == 0
    assert not hub.of_file("llama-Q8_0.gguf")
    [model] = json.loads(miniort("models", "--json").stdout)["models"][1:]
    assert (model["dtype"], model["origin"]) == ("F32", f"{hub.endpoint}, llama-F32.gguf")
    words = tmp_path / "words.json"
    words.write_bytes(tokenizer_of_words(512))
    with np.load(data / "fixtures" / "llama_optimum" / "reference.npz") as file:
        prompt, tokens = as_words(file["input_ids"]), file["greedy_tokens"].tolist()
    options = ["--tokenizer", str(words), "--max-new-tokens", "40"]
    assert generate_json(prompt, "--model", "tiny/llama-GGUF", *options)["tokens"] == tokens


# ------------------------------------------------------------------------------------------------------- the command


def test_a_second_pull_says_that_it_was_here(hub: Any, gpt2: dict[str, bytes], miniort: Miniort) -> None:
    hub.add("tiny/gpt2", gpt2)
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    result = miniort("pull", "tiny/gpt2")
    assert result.stdout.startswith("tiny/gpt2 was here already: ")
    assert result.stderr == ""


def test_another_dtype_is_made_of_what_is_here(hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path) -> None:
    hub.add("tiny/gpt2", gpt2)
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    sizes = [json.loads(miniort("models", "--json").stdout)["models"][1]["size"]]
    assert "is here" in miniort("pull", "tiny/gpt2", "--dtype", "f16").stdout
    assert len(hub.of_file("model.safetensors")) == 1
    [model] = json.loads(miniort("models", "--json").stdout)["models"][1:]
    assert model["dtype"] == "f16"
    assert model["size"] < sizes[0]
    assert len(list((tmp_path / "miniort-cache" / "hub" / "tiny--gpt2").glob("decoder-*"))) == 1
    assert miniort("generate", "t1 t2", "--model", "tiny/gpt2", "--max-new-tokens", "2").exit_code == 0


def test_a_pulled_model_is_converted_by_its_name(hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path) -> None:
    hub.add("tiny/gpt2", gpt2)
    line = error_line(miniort("convert", "tiny/gpt2", "-o", str(tmp_path / "int8"), "--dtype", "int8"))
    assert "`miniort pull tiny/gpt2` gets it" in line
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    assert miniort("convert", "tiny/gpt2", "-o", str(tmp_path / "int8"), "--dtype", "int8").exit_code == 0
    assert miniort("generate", "t1 t2", "--model", str(tmp_path / "int8"), "--max-new-tokens", "2").exit_code == 0


@pytest.mark.parametrize("gone", ["weights.bin", "prefill.onnx", "."])
def test_graphs_that_have_gone_are_made_again(hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path, gone: str) -> None:
    hub.add("tiny/gpt2", gpt2)
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    [folder] = (tmp_path / "miniort-cache" / "hub" / "tiny--gpt2").glob("decoder-*")
    if gone == ".":
        shutil.rmtree(folder)
    else:
        (folder / gone).unlink()
    line = error_line(miniort("generate", "t1 t2", "--model", "tiny/gpt2"))
    assert gone in line
    assert "`miniort pull tiny/gpt2` makes it again" in line
    assert "is here" in miniort("pull", "tiny/gpt2").stdout
    assert len(hub.of_file("model.safetensors")) == 1
    assert miniort("generate", "t1 t2", "--model", "tiny/gpt2", "--max-new-tokens", "1").exit_code == 0


def test_what_was_fetched_is_not_needed_to_run_graphs_that_were_made(
    hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path
) -> None:
    hub.add("tiny/gpt2", gpt2)
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    shutil.rmtree(tmp_path / "hf-home")
    assert miniort("generate", "t1 t2", "--model", "tiny/gpt2", "--max-new-tokens", "1").exit_code == 0
    assert json.loads(miniort("models", "--json").stdout)["models"][1]["trouble"] is None


def test_a_model_that_was_not_pulled(hub: Any, miniort: Miniort) -> None:
    line = error_line(miniort("generate", "x", "--model", "openai-community/gpt2"))
    assert "no folder openai-community/gpt2, and no model of this name was pulled" in line
    assert "`miniort pull openai-community/gpt2` gets it from the hub" in line
    assert hub.requests == []


def test_a_folder_of_that_name_comes_first(
    hub: Any, gpt2: dict[str, bytes], miniort: Miniort, demo_copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("tiny/gpt2", gpt2)
    assert miniort("pull", "tiny/gpt2").exit_code == 0
    (tmp_path / "tiny").mkdir()
    demo_copy().rename(tmp_path / "tiny" / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert json.loads(miniort("generate", "In", "--json", "--max-new-tokens", "1", "--model", "tiny/gpt2").stdout)["model"] == "gpt2"


def test_a_fault_is_one_line(hub: Any, gpt2: dict[str, bytes], miniort: Miniort) -> None:
    hub.add("tiny/gpt2", gpt2, gated="hf_right")
    assert "tiny/gpt2 is gated" in error_line(miniort("pull", "tiny/gpt2"))
    assert "there is no model nobody/nothing" in error_line(miniort("pull", "nobody/nothing"))
    assert "'gpt2' is no name on the hub" in error_line(miniort("pull", "gpt2"))
    assert "Missing argument" in error_line(miniort("pull"))
    assert "tiny/gpt2" not in miniort("models").stdout


def test_what_no_graph_can_be_made_of_is_known_before_the_weights_come(
    hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path
) -> None:
    config = {**json.loads(gpt2["config.json"]), "model_type": "mamba"}
    hub.add("tiny/mamba", {**gpt2, "config.json": json.dumps(config).encode()})
    line = error_line(miniort("pull", "tiny/mamba"))
    assert "architecture 'mamba'" in line
    assert "it has ONNX graphs too, which --onnx takes" in line
    assert not hub.of_file("model.safetensors")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_weights_that_do_not_fit(hub: Any, gpt2: dict[str, bytes], miniort: Miniort, tmp_path: Path) -> None:
    config = {**json.loads(gpt2["config.json"]), "n_embd": 128}
    hub.add("tiny/gpt2", {**gpt2, "config.json": json.dumps(config).encode()})
    error_line(miniort("pull", "tiny/gpt2"))
    assert {path.name for path in (tmp_path / "miniort-cache" / "hub" / "tiny--gpt2").iterdir()} == {"unfinished.json"}
    [model] = json.loads(miniort("models", "--json").stdout)["models"][1:]
    assert model["trouble"] == "fetched, but no graphs were made of it; `miniort pull tiny/gpt2` tries again, and says why not"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_bar_on_a_terminal_and_silence_elsewhere(hub: Any, gpt2: dict[str, bytes]) -> None:
    import pty  # which Windows lacks

    hub.add("tiny/gpt2", gpt2)
    ours, its = pty.openpty()
    with subprocess.Popen([*COMMAND, "pull", "tiny/gpt2"], stdout=subprocess.PIPE, stderr=its, text=True) as process:
        os.close(its)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # what Linux says when the other end is closed
                break
            if not part:
                break
            shown += part
        os.close(ours)
        assert process.stdout is not None
        printed = process.stdout.read()
    assert process.returncode == 0
    assert b"tiny/gpt2" in shown
    assert "tiny/gpt2 is here" in printed
