"""`miniort generate`: text as it comes, and everything about it as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from miniort.generation import Generator, open_decoder
from miniort_models.tokenizer import open_tokenizer

Miniort = Callable[..., Result]
GenerateJson = Callable[..., dict[str, Any]]

DATA = Path(__file__).parents[1] / "data"
GPT2 = str(DATA / "fixtures" / "gpt2_optimum")
TOKENIZER = str(DATA / "tokenizer" / "tokenizer.json")
PROMPT = "In the beginning"


def test_text_and_nothing_else_is_on_standard_output(miniort: Miniort, generate_json: GenerateJson) -> None:
    result = miniort("generate", PROMPT, "--max-new-tokens", "20", "--stats", "--top-k-print", "2")
    found = generate_json(PROMPT, "--max-new-tokens", "20")
    assert result.exit_code == 0
    assert result.stdout == PROMPT + found["text"] + "\n"
    assert len(found["text"]) > 40


def test_what_the_json_object_says(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "8", "--providers", "cpu")
    assert {key: found[key] for key in ("model", "prompt", "finish_reason", "sampler", "cache", "providers")} == {
        "model": "demo",
        "prompt": PROMPT,
        "finish_reason": "length",
        "sampler": "greedy",
        "cache": "static",
        "providers": ["cpu"],
    }
    assert len(found["tokens"]) == 8
    assert found["joins"].keys() == {"prefill", "decode"}
    assert "top_k" not in found

    statistics = found["statistics"]
    assert (statistics["prompt_tokens"], statistics["new_tokens"]) == (len(found["prompt_tokens"]), 8)
    tokens_run = len(found["prompt_tokens"]) + 7  # the last token is chosen, but not run
    layers, heads, head_dim, itemsize = 5, 6, 32, 4
    assert statistics["cache_bytes"] == statistics["cache_bytes_by_formula"] == 2 * layers * heads * head_dim * tokens_run * itemsize
    for figure in ("load_time", "time_to_first_token", "token_latency", "tokens_per_second"):
        assert statistics[figure] > 0


@pytest.mark.parametrize("prompt", [PROMPT, "a\ufffd", "naïve 😀", "two\n\nlines ", "<b>[red]"])
def test_the_text_goes_on_where_the_prompt_ends(generate_json: GenerateJson, miniort: Miniort, prompt: str) -> None:
    """All tokens, decoded at once, are the prompt and then the text: nothing is lost or said twice between them."""
    found = generate_json(prompt, "--max-new-tokens", "6")
    tokenizer = open_decoder("demo").open_tokenizer()
    assert prompt + found["text"] == tokenizer.decode([*found["prompt_tokens"], *found["tokens"]])
    assert miniort("generate", prompt, "--max-new-tokens", "6").stdout == prompt + found["text"] + "\n"


def test_a_cache_changes_nothing_but_the_time(generate_json: GenerateJson) -> None:
    cached = generate_json(PROMPT, "--max-new-tokens", "16")
    uncached = generate_json(PROMPT, "--max-new-tokens", "16", "--no-cache")
    assert uncached["tokens"] == cached["tokens"]
    assert uncached["cache"] is None
    assert uncached["statistics"]["cache_bytes"] is None


def test_a_prompt_may_be_run_in_chunks(generate_json: GenerateJson) -> None:
    prompt = "And it came to pass, that the LORD spake unto Moses"
    whole = generate_json(prompt, "--max-new-tokens", "12")
    assert generate_json(prompt, "--max-new-tokens", "12", "--prefill-chunk", "3")["tokens"] == whole["tokens"]


def test_the_likeliest_tokens_are_those_of_the_model(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "3", "--top-k-print", "4")
    decoder = open_decoder("demo")
    generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler())
    generator.append_tokens(found["prompt_tokens"])
    for token, candidates in zip(found["tokens"], found["top_k"], strict=True):
        logits = generator.logits()[0].astype(np.float64)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-logits)[:4]
        assert [each["id"] for each in candidates] == order.tolist()
        assert [each["logit"] for each in candidates] == logits[order].tolist()
        np.testing.assert_allclose([each["probability"] for each in candidates], probabilities[order], rtol=1e-9)
        assert [each["text"] for each in candidates] == [decoder.open_tokenizer().decode([each]) for each in order]
        assert token == candidates[0]["id"]
        generator.step()


def test_more_candidates_than_there_are_tokens_are_all_of_them(generate_json: GenerateJson) -> None:
    (candidates,) = generate_json(PROMPT, "--max-new-tokens", "1", "--top-k-print", "999999")["top_k"]
    assert len({each["id"] for each in candidates}) == len(candidates) == 2048
    assert sum(each["probability"] for each in candidates) == pytest.approx(1)


def test_tables_are_on_standard_error(miniort: Miniort) -> None:
    result = miniort("generate", PROMPT, "--max-new-tokens", "2", "--top-k-print", "3", "--stats")
    lines = result.stderr.splitlines()
    assert lines[0] == "likeliest as new token 1"
    assert lines[1].split() == ["token", "text", "logit", "probability"]
    assert lines[5] == "likeliest as new token 2"
    for figure in ("load time", "time to first token", "time per token", "tokens per second", "cache, measured", "cache, by formula"):
        assert any(line.startswith(figure) for line in lines), figure
    assert any(line.startswith("peak memory") for line in lines)
    assert any(line.startswith("cache in decode") for line in lines)


def test_json_with_statistics_leaves_standard_output_to_the_object(generate_json: GenerateJson) -> None:
    generate_json(PROMPT, "--max-new-tokens", "1", "--stats", "--top-k-print", "1")


def test_no_tokens_are_wanted(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "0")
    assert (found["tokens"], found["text"], found["finish_reason"]) == ([], "", "length")
    assert found["statistics"]["time_to_first_token"] is None


def test_the_end_token_ends_the_text_and_is_not_shown(generate_json: GenerateJson, demo_copy: Callable[..., Path]) -> None:
    free = generate_json(PROMPT, "--max-new-tokens", "30")
    end = free["tokens"][3]
    first = free["tokens"].index(end)
    found = generate_json(PROMPT, "--max-new-tokens", "30", "--model", str(demo_copy(eos_token_id=end)))
    assert found["finish_reason"] == "end"
    assert found["tokens"] == free["tokens"][: first + 1]
    tokenizer = open_decoder("demo").open_tokenizer()
    assert PROMPT + found["text"] == tokenizer.decode([*found["prompt_tokens"], *found["tokens"][:-1]])


def test_the_context_ends_the_text(generate_json: GenerateJson, demo_copy: Callable[..., Path]) -> None:
    found = generate_json(PROMPT, "--model", str(demo_copy(n_positions=9)))
    assert found["finish_reason"] == "context"
    assert len(found["prompt_tokens"]) + len(found["tokens"]) == 10  # the last token of a full context still has a successor


def test_an_empty_prompt_starts_from_the_end_token(generate_json: GenerateJson) -> None:
    found = generate_json("", "--max-new-tokens", "5")
    assert found["prompt_tokens"] == [0]
    assert found["prompt"] == ""
    assert len(found["text"]) > 0


def test_an_empty_prompt_starts_from_the_begin_token_where_there_is_one(
    generate_json: GenerateJson, demo_copy: Callable[..., Path]
) -> None:
    found = generate_json("", "--max-new-tokens", "1", "--model", str(demo_copy(bos_token_id=5)))
    assert found["prompt_tokens"] == [5]


def test_a_prompt_from_standard_input(generate_json: GenerateJson) -> None:
    wanted = generate_json("In the\nbeginning", "--max-new-tokens", "4")
    for text in ("In the\nbeginning", "In the\nbeginning\n"):
        found = generate_json("-", "--max-new-tokens", "4", stdin=text)
        assert found["prompt"] == "In the\nbeginning"
        assert found["tokens"] == wanted["tokens"]


def test_another_model_with_a_tokenizer_of_its_own_and_named_inputs(generate_json: GenerateJson) -> None:
    arguments = ("--model", GPT2, "--tokenizer", TOKENIZER, "--max-new-tokens", "12")
    found = generate_json("Hello there", *arguments)
    named = generate_json("Hello there", *arguments, "--bind", "tokens=input_ids", "--bind", "logits=logits")
    assert found["model"] == "gpt2_optimum"
    assert found["prompt_tokens"] == open_tokenizer(Path(TOKENIZER)).encode("Hello there")
    assert found["tokens"] == named["tokens"] == generate_json("Hello there", *arguments, "--no-cache")["tokens"]


def test_providers_have_their_onnxruntime_names_too(generate_json: GenerateJson) -> None:
    assert generate_json(PROMPT, "--max-new-tokens", "1", "--providers", "CPUExecutionProvider")["providers"] == ["cpu"]
