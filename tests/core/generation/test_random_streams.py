"""Same seed, same tokens: whatever batch a row is in, and wherever in it; and what reordering does to rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miniort.errors import GenerationError
from miniort.generation import Decoder, Generator, TokenHistory, generate, open_decoder, pad_left
from miniort.plugins import PluginManager
from miniort.types import FloatArray

PROMPTS = [[5, 6, 7], [9, 8], [100, 101, 102, 103]]


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


def generator_of(decoder: Decoder, rows: list[list[int]], seed: int | None = 1) -> Generator:
    tokens, mask = pad_left(rows)
    generator = Generator(decoder, decoder.new_cache(batch=len(rows)), decoder.new_sampler("categorical"), end_tokens=(), seed=seed)
    generator.append_tokens(tokens, mask)
    return generator


def continued(generator: Generator, count: int = 12) -> list[list[int]]:
    return np.array([step.ids for step in generate(generator, count)]).T.tolist()


def test_a_row_draws_the_same_alone_in_a_batch_and_anywhere_in_it(decoder: Decoder) -> None:
    alone = [continued(generator_of(decoder, [prompt]))[0] for prompt in PROMPTS]
    assert len({tuple(each) for each in alone}) == 3
    assert continued(generator_of(decoder, PROMPTS)) == alone
    assert continued(generator_of(decoder, PROMPTS[::-1])) == alone[::-1]
    assert continued(generator_of(decoder, PROMPTS, seed=2)) != alone


def test_rows_of_one_prompt_go_several_ways_the_same_wherever_they_stand(decoder: Decoder) -> None:
    first, second, other = PROMPTS[0], PROMPTS[0], PROMPTS[1]
    found = continued(generator_of(decoder, [first, second, other]))
    assert found[0] != found[1]
    assert found[0] == continued(generator_of(decoder, [first]))[0]
    assert continued(generator_of(decoder, [first, other, second])) == [found[0], found[2], found[1]]


def test_without_a_seed_runs_differ(decoder: Decoder) -> None:
    generator = generator_of(decoder, PROMPTS, seed=None)
    found = continued(generator)
    assert found != continued(generator_of(decoder, PROMPTS, seed=None))
    assert found == continued(generator_of(decoder, PROMPTS, seed=generator.seed)), "the seed that was taken can be read"


def test_a_negative_seed_is_refused(decoder: Decoder) -> None:
    with pytest.raises(GenerationError, match="seed must not be negative, found -1"):
        Generator(decoder, None, decoder.new_sampler(), seed=-1)


def test_a_fork_draws_what_the_original_draws(decoder: Decoder) -> None:
    generator = generator_of(decoder, PROMPTS)
    continued(generator, 3)
    fork = generator.fork()
    assert continued(generator, 8) == continued(fork, 8)


def test_reordered_rows_go_on_where_they_were(decoder: Decoder) -> None:
    straight, reordered = generator_of(decoder, PROMPTS), generator_of(decoder, PROMPTS)
    continued(straight, 4)
    continued(reordered, 4)
    reordered.logits()
    reordered.reorder([2, 0])
    assert reordered.tokens.tolist() == straight.tokens[[2, 0]].tolist()
    rest = continued(straight, 6)
    assert continued(reordered, 6) == [rest[2], rest[0]]


def test_repeated_rows_get_streams_of_their_own(decoder: Decoder) -> None:
    generator = generator_of(decoder, [PROMPTS[0]])
    generator.reorder([0, 0, 0])
    found = continued(generator)
    assert len({tuple(each) for each in found}) == 3
    assert found[0] == continued(generator_of(decoder, [PROMPTS[0]]))[0]
    again = generator_of(decoder, [PROMPTS[0]])
    again.reorder([0, 0, 0])
    assert continued(again) == found


@pytest.mark.parametrize("rows", [[3], [-1], [[0, 1]]])
def test_rows_that_are_not_there_cannot_be_reordered(decoder: Decoder, rows: list[int]) -> None:
    with pytest.raises(GenerationError, match="numbers from 0 to 2"):
        generator_of(decoder, PROMPTS).reorder(rows)


def test_processors_are_told_the_prompt_its_padding_and_what_remains(decoder: Decoder) -> None:
    seen: list[TokenHistory] = []

    def listen(history: TokenHistory, logits: FloatArray) -> FloatArray:
        seen.append(history)
        return logits

    tokens, mask = pad_left(PROMPTS)
    generator = Generator(decoder, decoder.new_cache(batch=3), decoder.new_sampler(), [listen], end_tokens=[7, 8])
    generator.append_tokens(tokens, mask)
    list(generate(generator, 2))
    generator.step()
    assert [each.remaining for each in seen] == [2, 1, 128 + 1 - 6]
    assert [each.prompt_length for each in seen] == [4, 4, 4]
    assert seen[0].end_tokens == {7, 8}
    assert [seen[2].row(row).tolist()[: len(prompt)] for row, prompt in enumerate(PROMPTS)] == PROMPTS
    assert seen[2].generated(1).tolist() == generator.tokens[1, 4:6].tolist()
    generator.append_tokens([[1], [2], [3]])
    generator.step()
    assert seen[3].prompt_length == 8
    generator.rewind(6)
    generator.step()
    assert seen[4].prompt_length == 6
