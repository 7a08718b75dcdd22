"""Constrained decoding: what comes out is a text of the schema, the expression or the list, whatever the model would rather say."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from miniort.errors import GenerationError, PluginError
from miniort.generation import Decoder, Generator, TokenHistory, generate, open_decoder, pad_left
from miniort.plugins import PluginManager
from miniort.types import FloatArray
from miniort_samplers.grammar import grammar
from miniort_samplers.json_schema import regex_of_schema

END = 256


class Bytes:
    """A tokenizer whose tokens are the 256 bytes, the end, and some words."""

    words = (b"ab", b"true", b'": ', b'", "', "é".encode(), b"}}")
    vocabulary_size = 257 + len(words)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return b"" if token == END else self.words[token - 257]


TOKENIZER = Bytes()


def history_of(generated: Sequence[int], remaining: int | None = None) -> TokenHistory:
    tokens = np.array([[1, 2, *generated]], np.int64)
    return TokenHistory(tokens, np.ones_like(tokens), 2, frozenset([END]), remaining)


def random_text(process: Callable[[TokenHistory, FloatArray], FloatArray], limit: int, rng: np.random.Generator) -> str:
    """A text of at most `limit` tokens, out of the tokens that a processor allows, all of them as likely."""
    generated: list[int] = []
    while len(generated) < limit:
        scores = process(history_of(generated, limit - len(generated)), np.zeros((1, 300), np.float32))
        token = int(rng.choice(np.flatnonzero(np.isfinite(scores[0]))))
        if token == END:
            break
        generated.append(token)
    return TOKENIZER.decode(generated)


PATTERNS = ["(ab|c)*", "a?b?", "(a|b)+c?", "ab*(c|$)?", "(abc)?a", "a{2,3}", "[^a]b*", "(a|ab)(c|bc)", "a|", "b.", "(ab|a|c)*b"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_the_texts_of_an_expression_are_allowed(pattern: str) -> None:
    """All texts of up to four letters, by Python's own re."""
    process = grammar(TOKENIZER, regex=pattern)

    def is_allowed(text: str) -> bool:
        """Whether each token of a text, then the end, may follow what's before."""
        for index, token in enumerate([*text.encode(), END]):
            try:
                scores = process(history_of(list(text.encode())[:index]), np.zeros((1, 300), np.float32))
            except GenerationError:
                return False
            if scores[0, token] == -np.inf:
                return False
        return True

    texts = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]
    wanted = [text for text in texts if re.fullmatch(pattern, text)]
    assert [text for text in texts if is_allowed(text)] == wanted
    assert wanted


def test_each_limit_that_is_long_enough_gives_a_whole_text() -> None:
    process = grammar(TOKENIZER, regex="ab(c[0-9]+d|efghi)*x")
    rng = np.random.default_rng(0)
    for limit in range(2, 40):  # ab is one token
        assert re.fullmatch("ab(c[0-9]+d|efghi)*x", random_text(process, limit, rng))
    with pytest.raises(GenerationError, match="takes 2 tokens, but only 1 may follow"):
        random_text(process, 1, rng)


def test_choices_are_taken_as_they_are_written() -> None:
    choices = ["a.b", "(x|y)", "é", "\n\\ \U0001f600", "a"]
    process = grammar(TOKENIZER, choices=choices)
    rng = np.random.default_rng(1)
    assert {random_text(process, 12, rng) for _ in range(80)} == set(choices)


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"type": "number"}}, "required": ["b"]},
    {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {'q"u\\o\nte': {"type": "integer"}}, "required": ['q"u\\o\nte']},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": False},
    {"type": "object"},
    {},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, "minItems": 1},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 2}]},
    {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
    {"enum": ['a"b\\c', "x\ny", "é", 1, None, True, 1.5, {"a": [1, "."]}]},
    {"type": "string", "enum": ["a", 3]},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/word"}], "$defs": {"word": {"type": "string", "minLength": 1}}},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid")),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_comes_out_is_valid(schema: Any) -> None:
    """By a validator that isn't ours, formats included, whatever the limit is. Tokens are chosen at random: mostly odd ones."""
    process = grammar(TOKENIZER, json_schema=schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    rng = np.random.default_rng(2)
    texts = {random_text(process, int(limit), rng) for limit in rng.integers(40, 80, size=8)}
    for text in texts:
        value = json.loads(text)
        validator.validate(value)
        if schema.get("format") == "time":  # two formats that the validator leaves to packages that aren't here
            datetime.time.fromisoformat(value)
        if schema.get("format") == "date-time":
            datetime.datetime.fromisoformat(value.replace("0000-", "0001-"))  # the year 0, which Python hasn't


def test_optional_keys_come_and_go() -> None:
    pattern = regex_of_schema({"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]})
    for text, allowed in (
        ('{"b":2}', True),
        ('{"a":1,"b":2}', True),
        ('{"a": 1, "b": 2, "c": 3}', True),
        ('{"a":1}', False),
        ('{"b":2,}', False),
        ('{"a":1,"c":3}', False),
        ("{}", False),
    ):
        assert bool(re.fullmatch(re.sub(r"\\x\{(..)\}", r"\\x\1", pattern), text)) is allowed


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 3}, "'minimum' at #,"),
        ({"type": "array", "items": {"type": "string", "pattern": ".*"}}, "'pattern' at #/items,"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' at #,"),
        ({"type": "object", "properties": {"a": {"type": "object", "minProperties": 1}}}, "'minProperties' at #/properties/a,"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' at #,"),
        ({"type": "object", "properties": {"a": {}}, "allOf": []}, "'allOf' at #,"),
        ({"not": {}}, "'not' at #,"),
        ({"type": "object", "required": ["b"]}, "requires 'b' at #"),
        ({"type": "string", "format": "email"}, "format 'email' at #"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 above maxLength 2 at #"),
        ({"type": "string", "const": 3}, "allows no value at #"),
        ({"type": "text"}, "type 'text' at #"),
        ({"$ref": "other.json"}, "refers to 'other.json' at #"),
        ({"$ref": "#/$defs/gone"}, "no such place"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}}, "#/[$]defs/n contains itself"),
        ({"items": {"$ref": "#"}}, "# contains itself"),
        ({"anyOf": []}, "isn't empty at #/anyOf"),
        ([], "object or true at #"),
    ],
)
def test_a_schema_that_could_not_be_kept_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        grammar(TOKENIZER, json_schema=schema)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "found none"),
        ({"regex": "a", "choices": ["a"]}, "found regex and choices"),
        ({"choices": []}, "aren't empty"),
        ({"choices": "yes"}, "found 'yes'"),
        ({"regex": "("}, "no automaton can be made of the pattern"),
        ({"regex": "a(?=b)"}, "no automaton can be made of the pattern"),
    ],
)
def test_options_that_make_no_grammar(options: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        grammar(TOKENIZER, **options)


def test_a_history_that_is_none_of_its_texts_is_an_error() -> None:
    process, logits = grammar(TOKENIZER, regex="ab"), np.zeros((1, 300), np.float32)
    with pytest.raises(GenerationError, match="token 99 may not stand where it does"):
        process(history_of([99]), logits)
    without_end = TokenHistory(np.ones((1, 1), np.int64), np.ones((1, 1), np.int64), 1)
    with pytest.raises(GenerationError, match="needs an end token"):
        process(without_end, logits)
    with pytest.raises(GenerationError, match="past the model's 90 logits"):
        process(history_of([]), np.zeros((1, 90), np.float32))


def test_without_outlines_core_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['outlines_core'] = None\n"
        "from miniort_samplers.grammar import grammar\n"
        "class Tokenizer:\n    vocabulary_size = 0\n"
        "try:\n    grammar(Tokenizer(), regex='a')\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f'{PluginError.__name__} grammar needs outlines-core: pip install "miniort-samplers[grammar]"'


# The demo model


@pytest.fixture(scope="module")
def demo(plugins: PluginManager) -> Decoder:
    return open_decoder("demo", plugins=plugins)


PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "sons": {"type": "array", "items": {"type": "string"}},
        "king": {"type": "boolean"},
    },
    "required": ["name", "age", "sons"],
}


@pytest.mark.parametrize(("sampler", "limit"), [("greedy", 23), ("greedy", 60), ("categorical", 40), ("categorical", None)])
def test_the_demo_model_always_writes_valid_json(demo: Decoder, sampler: str, limit: int | None) -> None:
    """Also up to the end of its context, of which one prompt leaves 57 tokens, and for a batch whose rows end at different times."""
    tokenizer = demo.open_tokenizer()
    tokens, mask = pad_left([tokenizer.encode("And David begat"), [5] * 200, tokenizer.encode("So")])
    wanted = {"grammar": {"json_schema": PERSON}, "temperature": {"temperature": 1.5}}
    generator = Generator(demo, demo.new_cache(batch=3), demo.new_sampler(sampler), demo.new_processors(wanted), seed=3)
    generator.append_tokens(tokens, mask)
    steps = np.array([step.ids for step in generate(generator, limit)])
    for row in range(3):
        value = json.loads(tokenizer.decode(steps[:, row].tolist()))
        jsonschema.validate(value, PERSON)


def test_rewinding_and_forking_follow_the_text(demo: Decoder) -> None:
    tokenizer = demo.open_tokenizer()
    generator = Generator(
        demo, demo.new_cache(), demo.new_sampler(), demo.new_processors({"grammar": {"regex": "[A-Z][a-z]+( [a-z]+){3}\\."}})
    )
    prompt = tokenizer.encode("And it came to pass")
    generator.append_tokens(prompt)
    first = [int(step.ids[0]) for step in generate(generator, 30)]
    generator.rewind(len(prompt) + 2)
    fork = generator.fork()
    assert [int(step.ids[0]) for step in generate(generator, 28)] == first[2:]
    assert [int(step.ids[0]) for step in generate(fork, 28)] == first[2:]
    assert re.fullmatch("[A-Z][a-z]+( [a-z]+){3}\\.", tokenizer.decode(first))


def test_no_room_for_any_text_is_an_error_and_not_half_a_text(demo: Decoder) -> None:
    generator = Generator(demo, demo.new_cache(), demo.new_sampler(), demo.new_processors({"grammar": {"json_schema": PERSON}}))
    generator.append_tokens([5] * 254)
    with pytest.raises(GenerationError, match="only 3 may follow"):
        generator.step()
