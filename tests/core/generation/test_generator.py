"""The generation loop on a real exporter's GPT-2: cached decoding is the same computation as uncached decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from miniort.errors import BindingError, CacheError, GenerationError
from miniort.generation import CacheSpec, Decoder, DecoderSource, Generator, KVCache, generate, open_decoder, pad_left
from miniort.plugins import PluginManager, create_plugin_manager
from miniort.types import Array, FloatArray, IntArray

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


def generator_of(decoder: Decoder, cache: KVCache | None = None, batch: int = 1, cached: bool = True, **options: Any) -> Generator:
    if cache is None and cached:
        cache = decoder.new_cache(batch=batch)
    return Generator(decoder, cache, decoder.new_sampler("greedy"), end_tokens=options.pop("end_tokens", ()), **options)


def random_tokens(count: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(3, 512, count)


def run(generator: Generator, tokens: Any, count: int) -> tuple[list[int], FloatArray]:
    generator.append_tokens(tokens)
    steps = list(generate(generator, count))
    return [int(step.ids[0]) for step in steps], np.concatenate([step.logits for step in steps])


def lengthen_positions(source: Path, target: Path, positions: int) -> Path:
    """The same decoder with a longer table of positions (the added rows are random)."""
    model = onnx.load(source / "model.onnx")
    table = next(each for each in model.graph.initializer if each.name.endswith("wpe.weight"))
    rows = onnx.numpy_helper.to_array(table)
    more = np.random.default_rng(7).standard_normal((positions - len(rows), rows.shape[1])).astype(np.float32) * rows.std()
    table.CopyFrom(onnx.numpy_helper.from_array(np.concatenate([rows, more]), table.name))
    target.mkdir()
    onnx.save(model, target / "model.onnx")
    (target / "config.json").write_text(f'{{"n_positions": {positions}}}')
    return target


def test_cached_equals_uncached_for_200_tokens(data: Path, tmp_path: Path, plugins: PluginManager) -> None:
    folder = lengthen_positions(data / "fixtures" / "gpt2_optimum", tmp_path / "long", 256)
    decoder = open_decoder(folder, plugins=plugins)
    cached, cached_logits = run(generator_of(decoder), random_tokens(23), 200)
    uncached, uncached_logits = run(generator_of(decoder, cached=False), random_tokens(23), 200)
    assert len(cached) == 200
    assert cached == uncached
    np.testing.assert_allclose(cached_logits, uncached_logits, atol=TOLERANCE, rtol=0)


def test_cached_equals_uncached_for_200_tokens_of_the_demo(plugins: PluginManager) -> None:
    decoder = open_decoder("demo", plugins=plugins)
    prompt = decoder.open_tokenizer().encode("In the beginning")
    cached, cached_logits = run(generator_of(decoder), prompt, 200)
    uncached, uncached_logits = run(generator_of(decoder, cached=False), prompt, 200)
    assert len(cached) == 200
    assert cached == uncached
    np.testing.assert_allclose(cached_logits, uncached_logits, atol=TOLERANCE, rtol=0)


def logits_after(decoder: Decoder, cache: KVCache, history: IntArray, new: IntArray, chunk: int) -> FloatArray:
    """Logits of all of `new`, [new, vocabulary], given in chunks behind a history that is already in the cache."""
    mask = np.ones((1, len(history) + len(new)), np.int64)
    decoder.forward(history[None], mask[:, : len(history)], cache)
    cache.commit(len(history))
    parts = []
    for start in range(0, len(new), chunk):
        tokens = new[start : start + chunk][None]
        parts.append(decoder.forward(tokens, mask[:, : cache.length + tokens.shape[1]], cache, every_logit=True)[0])
        cache.commit(tokens.shape[1])
    return np.concatenate(parts)


@pytest.mark.parametrize("chunk", [2, 3, 7])
def test_several_tokens_at_once_equal_one_by_one(decoder: Decoder, chunk: int) -> None:
    history, new = random_tokens(11, 1), random_tokens(7, 2)
    single = logits_after(decoder, decoder.new_cache(), history, new, 1)
    several = logits_after(decoder, decoder.new_cache(), history, new, chunk)
    np.testing.assert_allclose(several, single, atol=TOLERANCE, rtol=0)


class SwappedCache:
    """A wrong cache: it puts new keys and values in front of the old ones."""

    def __init__(self, right: KVCache, spec: CacheSpec) -> None:
        self.right, self.spec = right, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        new = key.shape[2]
        return tuple(
            np.concatenate([whole[:, :, whole.shape[2] - new :], whole[:, :, : whole.shape[2] - new]], axis=2)
            for whole in self.right.append(layer, key, value)
        )  # type: ignore[return-value]


def test_swapped_concat_passes_with_single_tokens_and_fails_with_several(decoder: Decoder) -> None:
    """Attention doesn't care in what order it sees keys, until the causal mask hides some: a check of single tokens proves nothing."""
    history, new = random_tokens(11, 1), random_tokens(6, 2)

    def swapped() -> Any:
        return SwappedCache(decoder.new_cache(), decoder.cache_spec(1))

    right = logits_after(decoder, decoder.new_cache(), history, new, 1)
    np.testing.assert_allclose(logits_after(decoder, swapped(), history, new, 1), right, atol=TOLERANCE, rtol=0)
    assert np.abs(logits_after(decoder, swapped(), history, new, 3) - right).max() > 100 * TOLERANCE


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_prefill_in_chunks(decoder: Decoder, chunk: int) -> None:
    tokens, logits = run(generator_of(decoder, prefill_chunk=chunk), random_tokens(23), 5)
    expected, expected_logits = run(generator_of(decoder), random_tokens(23), 5)
    assert tokens == expected
    np.testing.assert_allclose(logits, expected_logits, atol=TOLERANCE, rtol=0)


def test_batch_of_padded_rows_equals_each_alone(decoder: Decoder) -> None:
    rows = [random_tokens(count, count).tolist() for count in (2, 5, 9)]
    tokens, mask = pad_left(rows)
    assert mask.sum(axis=1).tolist() == [2, 5, 9]
    together = generator_of(decoder, batch=3)
    together.append_tokens(tokens, mask)
    steps = list(generate(together, 12))
    for index, row in enumerate(rows):
        alone, logits = run(generator_of(decoder), row, 12)
        assert [int(step.ids[index]) for step in steps] == alone
        np.testing.assert_allclose(np.stack([step.logits[index] for step in steps]), logits, atol=TOLERANCE, rtol=0)


def test_no_hook_runs_once_a_generator_is_built(data: Path) -> None:
    plugins = create_plugin_manager()
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)
    generator = generator_of(decoder)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a hook was called")

    plugins._inner_hookexec = refuse
    with pytest.raises(AssertionError):
        plugins.hook.miniort_samplers()
    tokens, _ = run(generator, random_tokens(5), 10)
    assert len(tokens) == 10


def test_rewind_forgets(decoder: Decoder) -> None:
    generator = generator_of(decoder)
    first, _ = run(generator, random_tokens(9), 10)
    generator.rewind(9 + 4)
    assert generator.tokens.shape == (1, 13)
    assert [int(step.ids[0]) for step in generate(generator, 6)] == first[4:]
    generator.rewind(3)
    generator.append_tokens(random_tokens(6, 5))
    again, _ = run(generator_of(decoder), np.concatenate([random_tokens(9)[:3], random_tokens(6, 5)]), 5)
    assert [int(step.ids[0]) for step in generate(generator, 5)] == again


@pytest.mark.parametrize("length", [0, -1, 15])
def test_rewind_refuses_what_is_not_there(decoder: Decoder, length: int) -> None:
    generator = generator_of(decoder)
    generator.append_tokens(random_tokens(14))
    with pytest.raises(GenerationError, match=r"can't rewind to .*14 tokens"):
        generator.rewind(length)


def test_fork_goes_its_own_way(decoder: Decoder) -> None:
    generator = generator_of(decoder)
    run(generator, random_tokens(9), 3)
    fork = generator.fork()
    fork.append_tokens(random_tokens(4, 8))
    forked = [int(step.ids[0]) for step in generate(fork, 5)]
    straight, _ = run(generator_of(decoder), random_tokens(9), 8)
    assert [int(step.ids[0]) for step in generate(generator, 5)] == straight[3:]
    expected, _ = run(generator_of(decoder), np.concatenate([random_tokens(9), straight[:3], random_tokens(4, 8)]), 5)
    assert forked == expected


class FailingCache:
    """A cache that interrupts the n-th append: Ctrl-C in the middle of a step."""

    def __init__(self, right: KVCache, fail_at: int, error: Callable[[], BaseException]) -> None:
        self.right, self.left, self.error = right, fail_at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def append(self, layer: int, key: Array, value: Array) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error()
        return self.right.append(layer, key, value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, lambda: CacheError("full")])
@pytest.mark.parametrize("fail_at", [1, 2, 8, 12])
def test_an_interrupted_step_can_be_taken_again(decoder: Decoder, fail_at: int, error: Callable[[], BaseException]) -> None:
    cache: Any = FailingCache(decoder.new_cache(), fail_at, error)
    generator = generator_of(decoder, cache)
    generator.append_tokens(random_tokens(9))
    tokens: list[int] = []
    interrupted = 0
    while len(tokens) < 8:
        try:
            tokens += [int(step.ids[0]) for step in generate(generator, 1)]
        except (KeyboardInterrupt, CacheError):
            interrupted += 1
    assert interrupted == 1
    assert tokens == run(generator_of(decoder), random_tokens(9), 8)[0]


def test_end_token_ends_a_row_and_the_others_go_on(decoder: Decoder) -> None:
    rows = [random_tokens(5, seed).tolist() for seed in (1, 2)]
    alone = [run(generator_of(decoder), row, 10)[0] for row in rows]
    end = next(token for token in alone[0][1:] if token not in alone[1])
    stop = alone[0].index(end)
    generator = generator_of(decoder, batch=2, end_tokens=[end])
    generator.append_tokens(rows)
    steps = list(generate(generator, 10))
    assert len(steps) == 10
    assert not generator.is_done
    assert [int(step.ids[0]) for step in steps] == alone[0][: stop + 1] + [end] * (9 - stop)
    assert [int(step.ids[1]) for step in steps] == alone[1]
    single = generator_of(decoder, end_tokens=[end])
    assert run(single, rows[0], 10)[0] == alone[0][: stop + 1]
    assert single.is_done


def test_a_full_context_ends_generation(decoder: Decoder) -> None:
    generator = generator_of(decoder)
    tokens, _ = run(generator, random_tokens(120), 100)
    assert len(tokens) == 128 - 120 + 1, "the last token of a full context still has a successor"
    assert generator.is_done
    with pytest.raises(GenerationError, match="context of 128 tokens is full"):
        generator.step()


def test_what_cannot_be_appended(decoder: Decoder) -> None:
    generator = generator_of(decoder)
    with pytest.raises(GenerationError, match="prompt"):
        generator.step()
    with pytest.raises(GenerationError, match="empty"):
        generator.append_tokens([])
    with pytest.raises(GenerationError, match="129 tokens are more than the model's context of 128"):
        generator.append_tokens(random_tokens(129))
    with pytest.raises(GenerationError, match="left"):
        generator.append_tokens([[5, 6, 7]], np.array([[1, 1, 0]]))
    with pytest.raises(GenerationError, match="shape"):
        generator.append_tokens([[5, 6, 7]], np.array([[1, 1]]))
    generator.append_tokens([5, 6])
    with pytest.raises(GenerationError, match="1 rows"):
        generator.append_tokens([[5], [6]])
    with pytest.raises(GenerationError, match="prefill_chunk"):
        generator_of(decoder, prefill_chunk=0)
    cache = decoder.new_cache()
    run(generator_of(decoder, cache), [5, 6, 7], 2)
    with pytest.raises(GenerationError, match="doesn't know"):
        generator_of(decoder, cache).append_tokens([5])
    with pytest.raises(GenerationError, match="negative"):
        list(generate(generator, -1))


def test_a_step_reads_no_more_than_the_new_token(decoder: Decoder) -> None:
    """History is computed once: what a step is given doesn't grow."""
    seen: list[int] = []
    cache: Any = decoder.new_cache()
    append = cache.append

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(cache, name)

        def append(self, layer: int, key: Array, value: Array) -> Any:
            seen.append(key.shape[2])
            return append(layer, key, value)

    run(generator_of(decoder, Counting()), random_tokens(9), 4)  # type: ignore[arg-type]
    assert seen == [9] * 3 + [1] * 9


def test_prefill_and_decode_share_weights(data: Path, plugins: PluginManager) -> None:
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum_legacy", plugins=plugins)
    assert set(decoder.sessions) == {"prefill", "decode"}
    arrays = [
        {id(value) for value in session.plan.initial if isinstance(value, np.ndarray) and value.nbytes > 1000}
        for session in decoder.sessions.values()
    ]
    assert arrays[0]
    assert arrays[0] == arrays[1]


@pytest.mark.parametrize("token", [512, -1])
def test_unknown_ids_are_refused(decoder: Decoder, token: int) -> None:
    generator = generator_of(decoder)
    with pytest.raises(GenerationError, match=rf"there is no token {token}: .* has 512 token ids, 0 to 511"):
        generator.append_tokens([3, token])
    assert len(run(generator, [3, 4], 3)[0]) == 3


def test_a_graph_without_past_is_refused(data: Path, plugins: PluginManager) -> None:
    path = data / "fixtures" / "gpt2_optimum_legacy" / "decoder_model.onnx"
    with pytest.raises(BindingError, match="takes no past"):
        Decoder(DecoderSource("prefill only", (path,)), plugins=plugins)
