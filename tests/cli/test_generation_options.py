"""Options of `miniort generate` beyond the plain text: stopping, scores, several texts, samplers, constraints, and caches on disk."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from miniort.generation import open_decoder

Miniort = Callable[..., Result]
GenerateJson = Callable[..., dict[str, Any]]

PROMPT = "In the beginning God created"
DATA = Path(__file__).parents[1] / "data"
GPT2 = str(DATA / "fixtures" / "gpt2_optimum")
TOKENIZER = str(DATA / "tokenizer" / "tokenizer.json")


def test_text_ends_before_a_stop_string(miniort: Miniort, generate_json: GenerateJson) -> None:
    free = generate_json(PROMPT, "--max-new-tokens", "30")["text"]
    stop = free[15:19]  # wherever tokens begin and end
    found = generate_json(PROMPT, "--max-new-tokens", "30", "--stop", stop, "--stop", "never said")
    assert found["text"] == free[: free.index(stop)]
    assert found["finish_reason"] == "stop"
    assert miniort("generate", PROMPT, "--max-new-tokens", "30", "--stop", stop).stdout == PROMPT + found["text"] + "\n"


def test_the_beginning_of_a_stop_string_at_the_end_is_text(generate_json: GenerateJson) -> None:
    free = generate_json(PROMPT, "--max-new-tokens", "10")["text"]
    found = generate_json(PROMPT, "--max-new-tokens", "10", "--stop", free[-2:] + "§")
    assert (found["text"], found["finish_reason"]) == (free, "length")


def test_what_the_models_makers_want_holds_until_something_else_is_asked_for(generate_json: GenerateJson) -> None:
    free = generate_json(PROMPT, "--max-new-tokens", "40")
    assert free["sampler"] == "greedy"
    assert free["processors"] == {"repetition_penalty": {"penalty": 1.25}}
    assert free["tokens"] == generate_json(PROMPT, "--max-new-tokens", "40", "--repetition-penalty", "1.25")["tokens"]
    plain = generate_json(PROMPT, "--max-new-tokens", "40", "--sampler", "greedy")
    assert plain["processors"] == {}
    assert plain["tokens"] != free["tokens"]
    assert generate_json(PROMPT, "--max-new-tokens", "4", "--temperature", "1")["processors"] == {"temperature": {"temperature": 1.0}}


def test_stop_token_ends_the_text(generate_json: GenerateJson) -> None:
    free = generate_json(PROMPT, "--max-new-tokens", "12")["tokens"]
    found = generate_json(PROMPT, "--max-new-tokens", "12", "--stop-token", str(free[5]))
    assert found["tokens"] == free[: free.index(free[5]) + 1]
    assert found["finish_reason"] == "end"


def test_max_length_counts_the_prompt(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-length", "12")
    assert len(found["prompt_tokens"]) + len(found["tokens"]) == 12
    assert found["finish_reason"] == "length"


def test_log_probabilities(generate_json: GenerateJson, miniort: Miniort) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "3", "--logprobs", "2", "--top-k-print", "1")
    assert [each["id"] for each in found["logprobs"]] == found["tokens"]
    for step, candidates in zip(found["logprobs"], found["top_k"], strict=True):
        assert len(step["top"]) == 2
        assert len(candidates) == 1
        assert step["logprob"] == step["top"][0]["logprob"] == pytest.approx(math.log(candidates[0]["probability"]))
    lines = miniort("generate", PROMPT, "--max-new-tokens", "3", "--logprobs", "1").stderr.splitlines()
    assert lines[0] == "log-probabilities"
    assert len(lines) == 2 + 3
    assert "top" not in generate_json(PROMPT, "--max-new-tokens", "1")


def test_several_continuations(generate_json: GenerateJson, miniort: Miniort) -> None:
    options = ("--max-new-tokens", "8", "--temperature", "1.2", "--seed", "5")
    found = generate_json(PROMPT, *options, "-n", "3")
    assert found["sampler"] == "categorical"
    texts = [each["text"] for each in found["continuations"]]
    assert len(set(texts)) == 3
    assert generate_json(PROMPT, *options)["text"] == texts[0], "the first one is what it is alone"
    assert [each["text"] for each in generate_json(PROMPT, *options, "-n", "3")["continuations"]] == texts
    printed = miniort("generate", PROMPT, *options, "-n", "3").stdout
    assert printed == "\n".join(f"{PROMPT}{text}\n" for text in texts)


def test_a_batch_is_each_prompt_alone(generate_json: GenerateJson, tmp_path: Path) -> None:
    prompts = ["In the beginning", "And", "The LORD said unto Moses, and"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n")
    options = ("--max-new-tokens", "9", "--stop", "and the")
    found = generate_json("--batch", str(file), *options)["continuations"]
    assert [each["prompt"] for each in found] == prompts
    for each in found:
        alone = generate_json(each["prompt"], *options)
        assert (each["text"], each["finish_reason"]) == (alone["text"], alone["finish_reason"])


def test_the_seed_and_nothing_else_decides(generate_json: GenerateJson) -> None:
    options = ("--max-new-tokens", "10", "--temperature", "1", "--top-p", "0.9", "--top-k", "50")
    first = generate_json(PROMPT, *options)
    again = generate_json(PROMPT, *options, "--seed", str(first["seed"]), "--cache", "paged")
    assert again["tokens"] == first["tokens"]
    assert again["processors"] == {"temperature": {"temperature": 1}, "top_k": {"k": 50}, "top_p": {"p": 0.9}}
    assert generate_json(PROMPT, *options, "--seed", "1")["tokens"] != generate_json(PROMPT, *options, "--seed", "2")["tokens"]


def test_processors_by_name_are_those_of_the_shortcuts(generate_json: GenerateJson) -> None:
    short = generate_json(PROMPT, "--max-new-tokens", "20", "--repetition-penalty", "1.5", "--no-repeat-ngram", "2")
    named = ("--processor", "repetition_penalty:penalty=1.5", "--processor", "no_repeat_ngram:size=2", "--sampler", "greedy")
    assert generate_json(PROMPT, "--max-new-tokens", "20", *named)["tokens"] == short["tokens"]
    assert short["sampler"] == "greedy"
    assert short["tokens"] != generate_json(PROMPT, "--max-new-tokens", "20")["tokens"]


def test_an_option_may_be_a_list_or_an_object(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "3", "--processor", 'logit_bias:biases={"300": 1000}')
    assert found["tokens"] == [300] * 3
    banned = generate_json(PROMPT, "--max-new-tokens", "1")["tokens"]
    found = generate_json(PROMPT, "--max-new-tokens", "1", "--processor", f"bad_words:words=[{banned}, [5, 6]]")
    assert found["tokens"] != banned


def test_beams(generate_json: GenerateJson) -> None:
    found = generate_json(PROMPT, "--max-new-tokens", "8", "--num-beams", "3", "-n", "2")
    assert (found["sampler"], found["sampler_options"]) == ("beam", {"num_beams": 3})
    first, second = found["continuations"]
    assert first["score"] >= second["score"]
    named = generate_json(PROMPT, "--max-new-tokens", "8", "--sampler", "beam:num_beams=3")
    assert named["tokens"] == first["tokens"]
    assert named["statistics"]["new_tokens"] == 8


def test_only_json_of_a_schema(generate_json: GenerateJson, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    properties = {"kind": {"enum": ["beast", "fowl"]}, "days": {"type": "integer"}}
    schema.write_text(json.dumps({"type": "object", "properties": properties, "required": ["kind", "days"], "additionalProperties": False}))
    for seed in range(3):
        options = ("--json-schema", str(schema), "--temperature", "1.5", "--seed", str(seed))
        found = generate_json(PROMPT, *options)
        written = json.loads(found["text"])
        assert written.keys() == {"kind", "days"}
        assert written["kind"] in ("beast", "fowl")
        assert isinstance(written["days"], int)
        assert found["finish_reason"] == "end"


def test_only_text_of_an_expression_or_a_choice(generate_json: GenerateJson) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-f]+", generate_json(PROMPT, "--regex", "[0-9]{3}-[a-f]+", "--max-new-tokens", "12")["text"])
    assert generate_json(PROMPT, "--choices", "heaven,earth")["text"] in ("heaven", "earth")


def test_steps_are_replayed_unless_that_is_turned_off(generate_json: GenerateJson, miniort: Miniort) -> None:
    arguments = ("Once upon", "--max-new-tokens", "9")
    replaying, anew = generate_json(*arguments), generate_json(*arguments, "--no-replay")
    assert replaying["statistics"]["replayed_steps"] == {"recorded": 1, "replayed": 6, "obstacle": None}
    assert anew["statistics"]["replayed_steps"] is None
    assert replaying["text"] == anew["text"]
    assert "steps replayed" in miniort("generate", *arguments, "--stats").stderr
    assert "steps replayed" not in miniort("generate", *arguments, "--stats", "--no-replay").stderr


def test_prompt_lookup_writes_the_same(generate_json: GenerateJson) -> None:
    for options in ((), ("--temperature", "0.7", "--seed", "3"), ("--stop", "And")):
        plain = generate_json(PROMPT, "--max-new-tokens", "40", *options)
        found = generate_json(PROMPT, "--max-new-tokens", "40", "--prompt-lookup", "5", *options)
        assert (found["tokens"], found["text"], found["finish_reason"]) == (plain["tokens"], plain["text"], plain["finish_reason"])


@pytest.mark.parametrize("layout", ["concat_bhtd", "paged"])
def test_a_prompt_is_paid_for_once(generate_json: GenerateJson, miniort: Miniort, tmp_path: Path, layout: str) -> None:
    file = str(tmp_path / "cache")
    assert miniort("generate", PROMPT, "--max-new-tokens", "0", "--save-cache", file).stdout == PROMPT + "\n"
    longer = PROMPT + " the heaven"
    found = generate_json(longer, "--max-new-tokens", "6", "--load-cache", file, "--cache", layout, "--temperature", "1", "--seed", "1")
    plain = generate_json(longer, "--max-new-tokens", "6", "--temperature", "1", "--seed", "1")
    assert found["tokens"] == plain["tokens"]
    assert found["statistics"]["reused_tokens"] == len(generate_json(PROMPT, "--max-new-tokens", "0")["prompt_tokens"]) - 1
    assert plain["statistics"]["reused_tokens"] == 0


def test_a_text_is_taken_up_again_where_it_ended(generate_json: GenerateJson, tmp_path: Path) -> None:
    file = str(tmp_path / "cache")
    first = generate_json(PROMPT, "--max-new-tokens", "10", "--save-cache", file)
    whole = PROMPT + first["text"]
    found = generate_json(whole, "--max-new-tokens", "5", "--load-cache", file, "--save-cache", file)
    assert found["text"] == generate_json(whole, "--max-new-tokens", "5")["text"]
    assert found["statistics"]["reused_tokens"] >= len(first["prompt_tokens"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--stop", ""], ["a --stop text must not be empty"]),
        (["--max-length", "3"], ["max_length is 3, and there are 9 tokens already"]),
        (["--temperature", "0"], ["temperature", "greedy"]),
        (["--temperature", "hot"], ["--temperature", "'hot'"]),
        (["--top-p", "7"], ["top_p", "7"]),
        (["--top-k", "0"], ["top_k", "0"]),
        (["--seed", "-1"], ["--seed"]),
        (["-n", "0"], ["--continuations"]),
        (["--sampler", "beam:num_beams=x"], ["sampler 'beam' can't be made with num_beams='x'"]),
        (["--sampler", "greedy:x=1"], ["sampler 'greedy' has no option 'x'"]),
        (["--sampler", ":x=1"], ["':x=1' has no name"]),
        (["--num-beams", "3", "--sampler", "greedy"], ["contradict each other"]),
        (["--num-beams", "2", "-n", "3"], ["3 continuations are more than the 2 that the search keeps"]),
        (["--num-beams", "2", "--logprobs", "1"], ["no single steps"]),
        (["--processor", "nope"], ["no logits processor is named 'nope'"]),
        (["--processor", "top_k"], ["'top_k' needs the option 'k'"]),
        (["--processor", "top_k:k=5", "--top-k", "4"], ["top_k is asked for twice"]),
        (["--processor", "logit_bias:biases=5"], ["'logit_bias' can't be made with biases=5"]),
        (["--json-schema", "nope.json"], ["nope.json can't be read"]),
        (["--json-schema", TOKENIZER, "--regex", "a"], ["grammar needs one of", "json_schema and regex"]),
        (["--regex", "("], ["'('"]),
        (["--cache", "window:foo=1"], ["has no option 'foo'; its options: window"]),
        (["--no-cache", "--prompt-lookup", "3"], ["--prompt-lookup needs a cache"]),
        (["-n", "2", "--save-cache", "x"], ["need a cache, one prompt and one continuation"]),
        (["--save-cache", "/nowhere/x"], ["--save-cache", "there is no folder /nowhere"]),
        (["--load-cache", "nope"], ["nope: can't be read as a saved cache"]),
        (["--load-cache", TOKENIZER], ["tokenizer.json: can't be read as a saved cache"]),
        (["--batch", TOKENIZER], ["PROMPT and --batch contradict each other"]),
    ],
)
def test_a_wrong_value_is_one_line(miniort: Miniort, arguments: list[str], parts: list[str]) -> None:
    result = miniort("generate", PROMPT, *arguments)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    for part in parts:
        assert part in line
    assert result.stdout == ""


def test_a_cache_of_another_model_is_refused_by_name(miniort: Miniort, tmp_path: Path) -> None:
    file = str(tmp_path / "cache")
    assert miniort("generate", PROMPT, "--max-new-tokens", "0", "--save-cache", file).exit_code == 0
    result = miniort("generate", PROMPT, "--model", GPT2, "--tokenizer", TOKENIZER, "--load-cache", file)
    assert result.exit_code == 2
    assert "a cache of another model, 'demo'" in result.stderr
    assert "this is 'gpt2_optimum'" in result.stderr


def test_files_of_prompts_that_hold_none(miniort: Miniort, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    for data, part in ((b"\n \n", "has no prompt in it"), (b"\xff", "must be UTF-8; byte 0")):
        file.write_bytes(data)
        result = miniort("generate", "--batch", str(file))
        assert result.exit_code == 2
        assert part in result.stderr
    assert "can't be read" in miniort("generate", "--batch", str(tmp_path / "nope")).stderr


def test_shortcuts_are_processors_that_there_are() -> None:
    """Each option of the command names a processor, and the one option that it has."""
    from miniort_cli.sampling_options import SHORTCUTS

    decoder = open_decoder("demo")
    for shortcut in SHORTCUTS:
        value = 0.5 if shortcut.type is float else 2
        assert len(decoder.new_processors({shortcut.processor: {shortcut.option: value}})) == 1
