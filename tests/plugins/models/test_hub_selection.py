"""Which names a hub can have, and which of a repository's files are taken. Nothing is fetched here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miniort.errors import ModelError
from miniort_models.file_size import describe_size
from miniort_models.hub import HubFile, Repository, is_hub_name
from miniort_models.hub_selection import Selection, select

TEXTS = ("config.json", "tokenizer.json", "README.md", "LICENSE", ".gitattributes")


def repository(*paths: str) -> Repository:
    """One that holds these files, each of 1.5 MB, and the usual small ones."""
    files = tuple(HubFile(path, 1_500_000, "0" * 64) for path in paths) + tuple(HubFile(path, 100, "0" * 40) for path in TEXTS)
    return Repository("owner/name", "https://hub.test", "main", "0" * 40, files)


def paths(selection: Selection) -> set[str]:
    return {file.path for file in selection.files}


@pytest.mark.parametrize("name", ["openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M", "a/b", "_a/b_c.d-e", "a/" + "b" * 96])
def test_names_on_a_hub(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "",
        "/",
        "a/",
        "/b",
        "a/b/c",
        "./b",
        "../b",
        "a/..",
        "~/b",
        "a\\b",
        "a/b c",
        "a/é",
        "a/b.git",
        "-a/b",
        "a/b-",
        "a--b/c",
        "a/b..c",
        "pkg:a/b",
        "https://x/y",
        "a/" + "b" * 97,
        "a/b\n",
    ],
)
def test_what_is_no_name_on_a_hub(name: str) -> None:
    assert not is_hub_name(name)


def test_openai_community_gpt2_as_it_is() -> None:
    """The files of a real repository that has its weights in six forms."""
    gpt2 = repository(
        "64-8bits.tflite",
        "64-fp16.tflite",
        "64.tflite",
        "flax_model.msgpack",
        "model.safetensors",
        "onnx/config.json",
        "onnx/decoder_model.onnx",
        "onnx/decoder_model_merged.onnx",
        "onnx/decoder_with_past_model.onnx",
        "onnx/generation_config.json",
        "onnx/merges.txt",
        "onnx/special_tokens_map.json",
        "onnx/tokenizer.json",
        "onnx/vocab.json",
        "pytorch_model.bin",
        "rust_model.ot",
        "tf_model.h5",
        "generation_config.json",
        "merges.txt",
        "tokenizer_config.json",
        "vocab.json",
    )
    small = {"config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    chosen = select(gpt2)
    assert (chosen.kind, chosen.weights) == ("safetensors", "model.safetensors")
    assert paths(chosen) == small | {"model.safetensors"}
    graphs = select(gpt2, onnx=True)
    assert graphs.graphs == ("onnx/decoder_model.onnx", "onnx/decoder_with_past_model.onnx")
    assert graphs.weights is None
    beside = {"config.json", "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "vocab.json"}
    assert paths(graphs) == {*graphs.graphs, *small, *(f"onnx/{name}" for name in beside)}


@pytest.mark.parametrize(
    ("files", "kind", "taken"),
    [
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors"], "safetensors", {"model.safetensors.index.json"}),
        (["model.safetensors", "original/consolidated.00.pth", "x.gguf"], "safetensors", {"model.safetensors"}),
        (["onnx/model.onnx", "onnx/model_q4.onnx", "onnx/model.onnx_data"], "onnx", {"onnx/model.onnx", "onnx/model.onnx_data"}),
        (["model.onnx", "model.onnx.data", "model.onnx_data_1"], "onnx", {"model.onnx", "model.onnx.data", "model.onnx_data_1"}),
        (["prefill.onnx", "decode.onnx", "weights.bin"], "onnx", {"prefill.onnx", "decode.onnx"}),
        (["cpu/int4/model.onnx", "cpu/int4/genai_config.json"], "onnx", {"cpu/int4/model.onnx", "cpu/int4/genai_config.json"}),
        (["onnx/model.onnx", "x.gguf"], "onnx", {"onnx/model.onnx"}),
        (["x-Q4_0.gguf", "mmproj-x.gguf", "imatrix.gguf"], "gguf", {"x-Q4_0.gguf"}),
    ],
)
def test_what_is_taken(files: list[str], kind: str, taken: set[str]) -> None:
    chosen = select(repository(*files))
    assert chosen.kind == kind
    small = set() if kind == "gguf" else {"config.json", "tokenizer.json"}
    assert paths(chosen) - {"config.json", "tokenizer.json"} == taken
    assert paths(chosen) & {"config.json", "tokenizer.json"} == (small if "cpu/int4/model.onnx" not in files else set())


QUANTISED = ("x.Q4_0.gguf", "x.Q8_0.gguf", "sub/x.F16.gguf")


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [("x.Q8_0.gguf", "x.Q8_0.gguf"), ("q8", "x.Q8_0.gguf"), ("x.F16.gguf", "sub/x.F16.gguf"), ("sub/", "sub/x.F16.gguf")],
)
def test_a_file_by_its_name_or_a_part_of_it(wanted: str, taken: str) -> None:
    chosen = select(repository(*QUANTISED, "model.safetensors"), file=wanted)
    assert (chosen.kind, chosen.weights, paths(chosen)) == ("gguf", taken, {taken})


def test_a_graph_by_its_name() -> None:
    """Though others have its name in theirs."""
    chosen = select(repository("onnx/model.onnx", "onnx/decoder_model.onnx", "onnx/model_q4.onnx"), file="model.onnx")
    assert (chosen.kind, chosen.graphs) == ("onnx", ("onnx/model.onnx",))


@pytest.mark.parametrize(
    ("files", "options", "parts"),
    [
        (QUANTISED, {}, ["owner/name has several GGUF files: x.Q4_0.gguf (1.5 MB), x.Q8_0.gguf (1.5 MB)", "choose one with --file"]),
        (QUANTISED, {"file": "x"}, ["--file x: owner/name has 3 such files: x.Q4_0.gguf (1.5 MB)"]),
        (QUANTISED, {"file": "Q5"}, ["--file Q5: owner/name has no such ONNX or GGUF file; it has x.Q4_0.gguf (1.5 MB)"]),
        (["model.safetensors"], {"file": "x"}, ["no such ONNX or GGUF file; it has none"]),
        (["model.safetensors"], {"file": "model.safetensors"}, ["wanted an ONNX or a GGUF file; leave --file out to take safetensors"]),
        (["model.safetensors"], {"onnx": True}, ["owner/name has no ONNX files, but model.safetensors (1.5 MB); leave --onnx out"]),
        ([], {"onnx": True}, ["owner/name has no ONNX files; leave --onnx out"]),
        (["onnx/a.onnx", "onnx/b.onnx"], {}, ["several ONNX decoders: onnx/a.onnx (1.5 MB), onnx/b.onnx (1.5 MB); choose one with --file"]),
        (
            ["a/model.onnx", "b/model.onnx"],
            {},
            ["several ONNX files: a/model.onnx (1.5 MB), b/model.onnx (1.5 MB); choose one with --file"],
        ),
        (["onnx/decode.onnx"], {}, ["owner/name/onnx holds decode.onnx, but prefill.onnx is missing"]),
        ([], {}, ["owner/name has no weights: looked for model.safetensors, model.safetensors.index.json, ONNX and GGUF files"]),
        (
            ["adapter_model.safetensors"],
            {},
            ["no model.safetensors, only adapter_model.safetensors (1.5 MB): parts of a model, such as an adapter"],
        ),
        (
            ["pytorch_model.bin"],
            {},
            ["only as a pickle (pytorch_model.bin (1.5 MB))", "refused", "https://hub.test/owner/name/discussions", "--revision refs/pr/"],
        ),
        (["consolidated.00.pth"], {}, ["only as a pickle (consolidated.00.pth (1.5 MB))"]),
        (["pytorch_model.bin"], {"file": "pytorch_model.bin"}, ["may run any code when it's read: refused"]),
    ],
)
def test_what_cannot_be_chosen(files: list[str], options: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        select(repository(*files), **options)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (99_400, "99.4 kB"), (548_105_171, "548 MB"), (5_000_000_000_000, "5.0 TB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert describe_size(size) == text


def test_recognising_a_name_does_not_import_huggingface_hub() -> None:
    code = (
        "import sys; from miniort_models.plugin import miniort_model_formats as hook\n"
        "hub = next(each for each in hook() if each.name == 'hub')\n"
        "assert hub.recognise('openai-community/gpt2')\n"
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
