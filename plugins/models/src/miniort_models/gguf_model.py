"""A decoder in a GGUF file: converted to graphs once, with its tokenizer, chat template and end tokens beside them as files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from miniort.errors import TokenizerError
from miniort_models.chat_template import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from miniort_models.conversion import OPSET, convert
from miniort_models.converted import converted_folder
from miniort_models.gguf_tokenizer import end_tokens, open_gguf_tokenizer, special_texts
from miniort_models.tokenizer import TOKENIZER_FILE
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.gguf_file import GgufFile, open_gguf
from miniort_models.weights.gguf_header import GgufHeader

GENERATION_CONFIG_FILE = "generation_config.json"


def converted_gguf(path: Path) -> Path:
    """The folder with the graphs of a GGUF file, its weights kept as they're quantised; it's made now if it isn't there yet.

    ModelError for a file that can't be read or converted. A tokenizer of an unknown kind is left out: it's missed when a text comes.
    """
    return converted_folder(path.stem, [path], partial(write_gguf, path))


def companion_files(file: GgufFile) -> dict[str, bytes]:
    """What else a folder with the graphs of a GGUF file needs, by name. TokenizerError if the tokenizer can't be read."""
    header = file.header
    tokenizer = {TOKENIZER_FILE: open_gguf_tokenizer(header).to_json().encode()}
    return tokenizer | _configuration_files(header)


def write_gguf(
    path: Path, folder: Path, *, opset: int = OPSET, dtype: WeightDtype | None = None, all_logits: bool = False, replace: bool = False
) -> None:
    """Convert a GGUF file to a folder, as `convert` does, with what else the file holds; see `converted_gguf`."""
    file = open_gguf(path)
    try:
        files = companion_files(file)
    except TokenizerError:
        files = _configuration_files(file.header)
    convert(file, folder, opset=opset, dtype=dtype, all_logits=all_logits, files=files, replace=replace)


def _configuration_files(header: GgufHeader) -> dict[str, bytes]:
    ends = sorted(end_tokens(header))
    files = {
        GENERATION_CONFIG_FILE: json.dumps({"eos_token_id": ends} if ends else {}).encode(),
        TOKENIZER_CONFIG_FILE: json.dumps(special_texts(header), ensure_ascii=False).encode(),
    }
    template = header.string("tokenizer.chat_template")
    return files if template is None else {**files, TEMPLATE_FILE: template.encode()}
