"""Caches on disk: what is loaded goes on as if it had never been away, in any layout; and what can't be loaded says why."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from miniort.errors import CacheError, GenerationError
from miniort.generation import Decoder, Generator, fingerprint, generate, load_cache, open_decoder, pad_left, save_cache
from miniort.plugins import PluginManager
from miniort.types import IntArray

EXACT = ["concat_bhtd", "concat_bthd", "static", "paged"]


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


def generator_of(decoder: Decoder, layout: str = "concat_bhtd", batch: int = 1, **options: Any) -> Generator:
    return Generator(decoder, decoder.new_cache(layout, batch, **options), decoder.new_sampler(), end_tokens=())


def prompt() -> IntArray:
    return np.random.default_rng(0).integers(3, 512, 20)


def run(generator: Generator, count: int) -> list[list[int]]:
    return [each.ids.tolist() for each in generate(generator, count)]


@pytest.fixture
def saved(decoder: Decoder, tmp_path: Path) -> Path:
    generator = generator_of(decoder)
    generator.append_tokens(prompt())
    run(generator, 4)
    save_cache(generator, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("target", [*EXACT, "window", "int8"])
@pytest.mark.parametrize("source", EXACT)
def test_any_layout_loads_what_another_saved(decoder: Decoder, tmp_path: Path, source: str, target: str) -> None:
    first = generator_of(decoder, source)
    first.append_tokens(prompt())
    run(first, 5)
    save_cache(first, tmp_path / "cache")
    second = generator_of(decoder, target)
    load_cache(second, tmp_path / "cache")
    assert second.tokens.tolist() == first.tokens.tolist()
    assert second.prompt_length == 20
    assert second.cache is not None
    assert second.cache.length == 24
    assert run(second, 6) == run(first, 6)


def test_nothing_that_was_loaded_is_computed_again(decoder: Decoder, saved: Path) -> None:
    generator = generator_of(decoder)
    load_cache(generator, saved)
    seen: list[int] = []
    cache: Any = generator.cache

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(cache, name)

        def append(self, layer: int, key: Any, value: Any) -> Any:
            seen.append(key.shape[2])
            return cache.append(layer, key, value)

    generator.cache = Counting()  # type: ignore[assignment]
    generator.step()
    assert set(seen) == {1}


def test_padded_batch(decoder: Decoder, tmp_path: Path) -> None:
    first = generator_of(decoder, batch=2)
    first.append_tokens(*pad_left([[5, 6, 7], [8, 9, 10, 11, 12]]))
    run(first, 3)
    save_cache(first, tmp_path / "cache")
    second = generator_of(decoder, "paged", batch=2)
    load_cache(second, tmp_path / "cache")
    assert second.mask.tolist() == first.mask.tolist()
    assert run(second, 5) == run(first, 5)


def test_rows_that_had_ended_stay_so(decoder: Decoder, tmp_path: Path) -> None:
    first = generator_of(decoder)
    first.append_tokens(prompt())
    end = run(first, 3)[-1][0]
    save_cache(first, tmp_path / "cache")
    second = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=[end])
    load_cache(second, tmp_path / "cache")
    assert second.is_done


@pytest.mark.parametrize("loader", ["window", "concat_bhtd"])
def test_layout_that_has_let_go_of_tokens(decoder: Decoder, tmp_path: Path, loader: str) -> None:
    first = generator_of(decoder, "window", window=8, sinks=2)
    first.append_tokens(prompt())
    run(first, 5)
    save_cache(first, tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="numpy") as file:
        assert file.get_tensor("layers.0.key").shape[2] == 10
    if loader == "concat_bhtd":
        generator = generator_of(decoder)
        with pytest.raises(CacheError, match="had let go of tokens that this layout keeps, the first at position 2"):
            load_cache(generator, tmp_path / "cache")
        generator.append_tokens(prompt())  # nothing was left behind
        run(generator, 1)
        return
    second = generator_of(decoder, "window", window=8, sinks=2)
    load_cache(second, tmp_path / "cache")
    with pytest.raises(CacheError, match="loaded without what is needed below 24"):
        second.rewind(23)
    assert run(second, 6) == run(first, 6)


def test_save_of_a_generator_whose_last_token_has_been_run(decoder: Decoder, tmp_path: Path) -> None:
    first = generator_of(decoder)
    first.append_tokens(prompt())
    first.logits()
    save_cache(first, tmp_path / "cache")
    second = generator_of(decoder)
    load_cache(second, tmp_path / "cache")
    assert run(second, 4) == run(first, 4)


def test_elements_that_safetensors_does_not_know(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 cache comes back bit by bit."""
    import ml_dtypes

    class Halved(Decoder):
        def cache_spec(self, batch: int) -> Any:
            from dataclasses import replace

            return replace(super().cache_spec(batch), dtype=np.dtype(ml_dtypes.bfloat16))

    halved = Halved(decoder.source, plugins=decoder.plugins)
    spec = halved.cache_spec(1)
    cache = halved.new_cache()
    rng = np.random.default_rng(0)
    for layer in range(spec.layers):
        cache.append(layer, *(rng.standard_normal((1, spec.kv_heads, 3, spec.head_dim)).astype(spec.dtype) for _ in range(2)))
    cache.commit(3)
    first = Generator(halved, halved.new_cache(), halved.new_sampler())
    first.adopt(cache, np.array([[5, 6, 7, 8]]), np.ones((1, 4), np.int64), 4)
    save_cache(first, tmp_path / "cache")
    second = Generator(halved, halved.new_cache(), halved.new_sampler())
    load_cache(second, tmp_path / "cache")
    assert second.cache is not None
    nothing = np.empty((1, spec.kv_heads, 0, spec.head_dim), spec.dtype)
    for layer in range(spec.layers):
        for found, wanted in zip(second.cache.append(layer, nothing, nothing), cache.append(layer, nothing, nothing), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def change_weight(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    weight = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    data = bytearray(weight.raw_data)
    data[0] ^= 1
    weight.raw_data = bytes(data)
    onnx.save(model, folder / "model.onnx")


def test_fingerprint_is_of_the_content(decoder: Decoder, data: Path, tmp_path: Path, plugins: PluginManager) -> None:
    folder = shutil.copytree(data / "fixtures" / "gpt2_optimum", tmp_path / "renamed")
    assert fingerprint(open_decoder(folder, plugins=plugins)) == fingerprint(decoder)
    change_weight(folder)
    assert fingerprint(open_decoder(folder, plugins=plugins)) != fingerprint(decoder)


def test_fingerprint_sees_weights_in_other_files(tmp_path: Path, plugins: PluginManager) -> None:
    import miniort_models

    folder = shutil.copytree(Path(miniort_models.__file__).parent / "demo", tmp_path / "demo-copy")
    before = fingerprint(open_decoder(folder, plugins=plugins))
    with open(folder / "weights.bin", "r+b") as file:
        file.seek(1000)
        file.write(b"\x01\x02\x03\x04")
    assert fingerprint(open_decoder(folder, plugins=plugins)) != before


def test_file_of_another_model_is_refused_by_name(saved: Path, data: Path, plugins: PluginManager) -> None:
    other = open_decoder(data / "fixtures" / "llama_optimum", plugins=plugins)
    with pytest.raises(CacheError, match=r"a cache of another model, 'gpt2_optimum' .*; this is 'llama_optimum'"):
        load_cache(generator_of(other), saved)


def damaged_files(saved: Path, tmp_path: Path) -> dict[str, Path]:
    whole = saved.read_bytes()
    files = {name: tmp_path / name for name in ("short", "header", "empty", "text", "foreign", "lacking")}
    files["short"].write_bytes(whole[:-100])
    files["header"].write_bytes(whole[:20])
    files["empty"].write_bytes(b"")
    files["text"].write_text("{}")
    save_file({"x": np.zeros(3, np.float32)}, files["foreign"])
    with safe_open(saved, framework="numpy") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name != "layers.1.value"}  # noqa: SIM118
        save_file(kept, files["lacking"], file.metadata())
    return {**files, "missing": tmp_path / "missing", "folder": tmp_path}


@pytest.mark.parametrize("name", ["short", "header", "empty", "text", "foreign", "lacking", "missing", "folder"])
def test_file_that_is_no_cache_is_one_clear_error(decoder: Decoder, saved: Path, tmp_path: Path, name: str) -> None:
    path = damaged_files(saved, tmp_path)[name]
    generator = generator_of(decoder)
    with pytest.raises(CacheError) as caught:
        load_cache(generator, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    load_cache(generator, saved)  # the generator is as it was


def test_failed_save_leaves_the_old_file_and_no_other(
    decoder: Decoder, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    generator = generator_of(decoder)
    generator.append_tokens(prompt())
    run(generator, 2)

    def no_space(self: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(CacheError, match="can't be written"):
        save_cache(generator, saved)
    assert saved.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(CacheError, match="can't be written"):
        save_cache(generator, tmp_path / "nowhere" / "file")


def test_what_cannot_be_saved_or_loaded(decoder: Decoder, saved: Path, tmp_path: Path) -> None:
    uncached = Generator(decoder, None, decoder.new_sampler())
    with pytest.raises(GenerationError, match="no cache to save"):
        save_cache(uncached, tmp_path / "x")
    with pytest.raises(GenerationError, match="no cache to load into"):
        load_cache(uncached, saved)
    with pytest.raises(GenerationError, match="nothing to save yet"):
        save_cache(generator_of(decoder), tmp_path / "x")
    used = generator_of(decoder)
    used.append_tokens(prompt())
    with pytest.raises(GenerationError, match="only a generator without tokens"):
        load_cache(used, saved)
    with pytest.raises(CacheError):
        load_cache(generator_of(decoder, batch=2), saved)
