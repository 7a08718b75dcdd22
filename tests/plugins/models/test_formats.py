"""What the model formats recognise, and what they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miniort.errors import ModelError, TokenizerError
from miniort.generation.sources import DecoderSource, ModelFormat
from miniort.plugins import collect_mapping, create_plugin_manager

TOKENIZER = Path(__file__).parents[2] / "data" / "tokenizer" / "tokenizer.json"
FORMATS = collect_mapping(create_plugin_manager(allow=["models"]), "miniort_model_formats", ModelFormat)


def recognised_by(source: str) -> list[str]:
    return [name for name, model_format in FORMATS.items() if model_format.recognise(source)]


def open_folder(folder: Path) -> DecoderSource:
    assert recognised_by(str(folder)) == ["onnx_folder"]
    return FORMATS["onnx_folder"].open(str(folder))


def fill(folder: Path, *names: str, **contents: object) -> Path:
    """Put empty files of these names into a folder, and JSON files."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("names", "graphs"),
    [
        (["prefill.onnx", "decode.onnx", "weights.bin"], ["prefill.onnx", "decode.onnx"]),
        (
            ["decoder_model.onnx", "decoder_with_past_model.onnx", "decoder_model_merged.onnx"],
            ["decoder_model.onnx", "decoder_with_past_model.onnx"],
        ),
        (["decoder_model.onnx", "decoder_model_merged.onnx"], ["decoder_model_merged.onnx"]),
        (["decoder_model.onnx"], ["decoder_model.onnx"]),
        (["model.onnx", "model_fp16.onnx", "model.onnx_data"], ["model.onnx"]),
        (["gpt2-small.onnx", "gpt2-small.onnx.data"], ["gpt2-small.onnx"]),
        (["onnx/model.onnx", "onnx/model_q4.onnx", "config.json.bak"], ["onnx/model.onnx"]),
        (["onnx/prefill.onnx", "onnx/decode.onnx"], ["onnx/prefill.onnx", "onnx/decode.onnx"]),
        (["model.onnx", "onnx/other.onnx"], ["model.onnx"]),
    ],
)
def test_graphs_of_a_folder(tmp_path: Path, names: list[str], graphs: list[str]) -> None:
    source = open_folder(fill(tmp_path, *names))
    assert source.graphs == tuple(tmp_path / name for name in graphs)
    assert source.name == tmp_path.name


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.onnx", "b.onnx"], r"several decoders: a.onnx; b.onnx; name one file"),
        (["model.onnx", "prefill.onnx", "decode.onnx"], r"several decoders: prefill.onnx \+ decode.onnx; model.onnx"),
        (["onnx/a.onnx", "onnx/b.onnx"], r"onnx holds several decoders: a.onnx; b.onnx"),
        (["decode.onnx"], r"holds decode.onnx, but prefill.onnx is missing"),
        (["prefill.onnx", "weights.bin"], r"holds prefill.onnx, but decode.onnx is missing"),
        (["decoder_with_past_model.onnx"], r"holds decoder_with_past_model.onnx, but decoder_model.onnx is missing"),
        (
            ["model.safetensors"],
            r"holds no decoder: looked there and in its sub-folder onnx for prefill.onnx \+ decode.onnx, "
            r"decoder_model.onnx \+ decoder_with_past_model.onnx, model.onnx or one other .onnx file",
        ),
    ],
)
def test_folders_that_hold_no_decoder_or_several(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_folder(fill(tmp_path, *names))


def test_graphs_behind_links_as_a_hub_cache_has_them(tmp_path: Path) -> None:
    fill(tmp_path, "blobs/abc", "snapshots/1/README.md")
    link = tmp_path / "snapshots" / "1" / "model.onnx"
    link.symlink_to(Path("..") / ".." / "blobs" / "abc")
    assert open_folder(link.parent).graphs == (link,)


def test_one_file(tmp_path: Path) -> None:
    path = fill(tmp_path, "decode.onnx", config={"n_ctx": 64}) / "decode.onnx"
    assert recognised_by(str(path)) == ["onnx_file"]
    source = FORMATS["onnx_file"].open(str(path))
    assert (source.name, source.graphs, source.context_length, source.tokenizer) == ("decode.onnx", (path,), 64, None)


@pytest.mark.parametrize("name", ["missing", "missing/model.onnx"])
def test_a_path_to_nothing(tmp_path: Path, name: str) -> None:
    source = str(tmp_path / name)
    (found,) = recognised_by(source)
    with pytest.raises(ModelError, match=r"^no such file or folder: .*missing"):
        FORMATS[found].open(source)


@pytest.mark.parametrize("source", ["", "Demo", "nothing", "a/b/c", "\0", "x" * 5000])
def test_names_that_are_somebody_elses(source: str) -> None:
    assert recognised_by(source) == []


def test_a_file_of_another_kind_is_somebody_elses(tmp_path: Path) -> None:
    assert recognised_by(str(fill(tmp_path, "model.h5") / "model.h5")) == []


def test_a_folder_named_like_a_file(tmp_path: Path) -> None:
    folder = fill(tmp_path / "gpt2.onnx", "model.onnx")
    assert open_folder(folder).graphs == (folder / "model.onnx",)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    fill(tmp_path / "gpt2", "model.onnx")
    assert recognised_by(os.path.join("~", "gpt2")) == ["onnx_folder"]
    assert FORMATS["onnx_folder"].open("~/gpt2").graphs == (tmp_path / "gpt2" / "model.onnx",)
    assert FORMATS["onnx_file"].open("~/gpt2/model.onnx").graphs == (tmp_path / "gpt2" / "model.onnx",)


def test_the_demo_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "demo", "model.onnx")
    monkeypatch.chdir(tmp_path)
    assert recognised_by("demo")[0] == "demo"
    assert recognised_by("./demo") == ["onnx_folder"]


def test_the_demo_model_is_whole() -> None:
    source = FORMATS["demo"].open("demo")
    assert [graph.name for graph in source.graphs] == ["prefill.onnx", "decode.onnx"]
    assert source.name == "demo"
    assert source.context_length is not None
    assert source.context_length >= 256
    assert source.tokenizer is not None
    tokenizer = source.tokenizer()
    ids = tokenizer.encode("In the beginning God created the heaven and the earth.")
    assert tokenizer.decode(ids) == "In the beginning God created the heaven and the earth."
    assert max(ids) < tokenizer.vocabulary_size


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({}, None),
        ({"config": {"model_type": "gpt2"}}, None),
        ({"config": {"n_positions": 1024, "n_ctx": 512}}, 1024),
        ({"config": {"n_ctx": 512}}, 512),
        ({"config": {"max_position_embeddings": 4096, "n_positions": None}}, 4096),
        ({"genai_config": {"model": {"context_length": 256}}}, 256),
        ({"config": {"max_position_embeddings": 128}, "genai_config": {"model": {"context_length": 256}}}, 128),
    ],
)
def test_context_length(tmp_path: Path, files: dict[str, object], length: int | None) -> None:
    assert open_folder(fill(tmp_path, "model.onnx", **files)).context_length == length


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 2}}, {2}),
        ({"config": {"eos_token_id": 0}}, {0}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [2, 7]}}, {2, 7}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"do_sample": True}}, {2}),
        ({"config": {"eos_token_id": None}}, set()),
        ({"genai_config": {"model": {"eos_token_id": [5]}}}, {5}),
        # In a model for conversations the tokenizer's end token ends a turn, and the configuration may know only the end of a text.
        (
            {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<e>", "added_tokens_decoder": {"9": {"content": "<e>"}}}},
            {2, 9},
        ),
        ({"tokenizer_config": {"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"9": {"content": "<e>"}, "x": {}}}}, {9}),
        ({"tokenizer_config": {"eos_token": "<e>"}}, set()),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<e>"}}}}, set()),
    ],
)
def test_end_tokens(tmp_path: Path, files: dict[str, object], tokens: set[int]) -> None:
    assert open_folder(fill(tmp_path, "model.onnx", **files)).end_tokens == tokens


@pytest.mark.parametrize(
    ("files", "token"),
    [
        ({}, None),
        ({"config": {"bos_token_id": 0}}, 0),
        ({"config": {"bos_token_id": 2}, "generation_config": {"bos_token_id": 7}}, 7),
        ({"genai_config": {"model": {"bos_token_id": [5, 6]}}}, 5),
    ],
)
def test_the_begin_token(tmp_path: Path, files: dict[str, object], token: int | None) -> None:
    assert open_folder(fill(tmp_path, "model.onnx", **files)).begin_token == token


def test_a_chat_template_is_there_or_not(tmp_path: Path) -> None:
    assert open_folder(fill(tmp_path, "model.onnx", tokenizer_config={"eos_token": "</s>"})).chat_template is None
    fill(tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}{{ eos_token }}", "eos_token": "</s>"})
    opener = open_folder(tmp_path).chat_template
    assert opener is not None
    assert opener().render([{"role": "user", "content": "hi"}]) == "hi</s>"


def test_a_tokenizer_in_two_files(tmp_path: Path) -> None:
    """As GPT-2 was published."""
    assert open_folder(fill(tmp_path, "model.onnx", vocab={"a": 0, "b": 1, "ab": 2})).tokenizer is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    opener = open_folder(tmp_path).tokenizer
    assert opener is not None
    assert opener().encode("abb") == [2, 1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"bos_token_id": "<s>"}}, r"config.json: bos_token_id must be a token id, found '<s>'"),
        ({"config": [1]}, r"config.json must be a JSON object, found list"),
        ({"config": {"n_positions": "many"}}, r"config.json: n_positions must be a number of tokens, found 'many'"),
        ({"config": {"n_positions": 0}}, r"n_positions must be a number of tokens, found 0"),
        ({"config": {"n_positions": True}}, r"n_positions must be a number of tokens, found True"),
        ({"generation_config": {"eos_token_id": [1, "</s>"]}}, r"generation_config.json: eos_token_id must be a token id or a list"),
        ({"config": {"eos_token_id": -1}}, r"config.json: eos_token_id must be a token id or a list of them, found -1"),
        ({"genai_config": {"model": {"context_length": 1.5}}}, r"genai_config.json: model.context_length must be a number of tokens"),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_folder(fill(tmp_path, "model.onnx", **files))


@pytest.mark.parametrize("content", [b'{"n_ctx": 12', b"", b"\xff\xfe{}", b"[" * 100_000])
def test_a_damaged_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (fill(tmp_path, "model.onnx") / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config.json can't be read as JSON: .*; get it again$"):
        open_folder(tmp_path)


def test_companions_of_a_sub_folder_lie_in_its_parent(tmp_path: Path) -> None:
    fill(tmp_path, "onnx/model.onnx", config={"n_ctx": 64, "eos_token_id": 3})
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    source = open_folder(tmp_path)
    assert source.context_length == 64
    assert source.end_tokens == {3}
    assert source.tokenizer is not None
    assert source.tokenizer().vocabulary_size == 512
    one_file = FORMATS["onnx_file"].open(str(tmp_path / "onnx" / "model.onnx"))
    assert (one_file.context_length, one_file.tokenizer is None) == (64, False)


def test_a_relative_path_has_a_parent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "onnx/model.onnx", config={"n_ctx": 64})
    monkeypatch.chdir(tmp_path / "onnx")
    assert open_folder(Path(".")).context_length == 64


def test_files_beside_the_graph_come_first(tmp_path: Path) -> None:
    fill(tmp_path, "onnx/model.onnx", config={"n_ctx": 64})
    fill(tmp_path / "onnx", config={"n_ctx": 32})
    assert open_folder(tmp_path).context_length == 32


def test_a_parent_that_is_no_model_is_left_alone(tmp_path: Path) -> None:
    """Many a folder has a `config.json`."""
    (tmp_path / "config.json").write_text("// settings of an editor")
    assert open_folder(fill(tmp_path / "gpt2", "model.onnx")).context_length is None


def test_a_damaged_tokenizer_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    fill(tmp_path, "model.onnx", "tokenizer.json")
    tokenizer = open_folder(tmp_path).tokenizer
    assert tokenizer is not None
    with pytest.raises(TokenizerError, match=r"tokenizer.json is no tokenizer"):
        tokenizer()


def test_listing_the_formats_does_not_import_tokenizers() -> None:
    code = (
        "import sys; from miniort_models.plugin import miniort_model_formats as hook\n"
        "assert not {'tokenizers', 'onnx', 'onnx_ir', 'numpy'} & set(sys.modules)\n"
        "hook()[0].recognise('demo')\n"
        "assert not {'tokenizers', 'onnx', 'onnx_ir'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("said", "wanted"), [(1.3, {"repetition_penalty": {"penalty": 1.3}}), (1.0, {}), (None, {})])
def test_the_repetition_penalty_that_the_makers_want(tmp_path: Path, said: float | None, wanted: dict[str, object]) -> None:
    fill(tmp_path, "model.onnx", generation_config={"repetition_penalty": said})
    assert open_folder(tmp_path).processors == wanted


def test_a_repetition_penalty_that_cannot_be(tmp_path: Path) -> None:
    fill(tmp_path, "model.onnx", generation_config={"repetition_penalty": "much"})
    with pytest.raises(ModelError, match=r"generation_config.json: repetition_penalty must be a number above 0, found 'much'"):
        open_folder(tmp_path)
