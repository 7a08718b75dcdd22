"""The verifier passes every layout that's right, on several exports, and catches those that are wrong, each by the check meant for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.errors import GenerationError, PluginError
from miniort.generation import CacheLayoutInfo, CacheSpec, Decoder, LayoutChoice, LayoutVerification, Verifier, open_decoder, usable_layouts
from miniort.plugins import PluginManager, create_plugin_manager, hookimpl
from miniort.types import Array, IntArray
from miniort_cache_layouts.concat import concat_bhtd

CONTEXT = 32


class Wrong:
    """A layout that does everything right. Those below do one thing wrong each."""

    def __init__(self, spec: CacheSpec) -> None:
        self.right: Any = concat_bhtd(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def fork(self) -> Any:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, right=self.right.fork())
        return other


class Swapped(Wrong):
    """New tokens in front of the old ones: right for single tokens, since attention doesn't care about the order of what it sees."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        new = key.shape[2]
        return tuple(
            np.concatenate([whole[:, :, -new:], whole[:, :, :-new]], axis=2) if new else whole
            for whole in self.right.append(layer, key, value)
        )  # type: ignore[return-value]


class KeepsWhatIsCropped(Wrong):
    """A crop that only lowers the offset: what is appended next goes behind what should be gone."""

    def crop(self, length: int) -> None:
        pass

    @property
    def length(self) -> int:
        return int(self.right.length)


class SharedFork(Wrong):
    def fork(self) -> Any:
        return self


class MixesRows(Wrong):
    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = self.right.append(layer, key, value)
        return keys[::-1], values[::-1]


class ForgetsInSecret(Wrong):
    """Lets go of the first token once there are twelve, which only a layout that says so may."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = self.right.append(layer, key, value)
        if self.right.length >= 12:
            keys, values = keys.copy(), values.copy()
            keys[:, :, 0], values[:, :, 0] = 0, 0
        return keys, values


class WrongType(Wrong):
    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = self.right.append(layer, key, value)
        return keys.astype(np.float64), values.astype(np.float64)


class NotANumber(Wrong):
    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = self.right.append(layer, key, value)
        return keys, values * np.float32(np.nan)


class Raises(Wrong):
    def commit(self, count: int) -> None:
        raise ZeroDivisionError("a bug of its own")


class MovesWindow(Wrong):
    """Says that it keeps the last eight tokens, and shows the eight before the last."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = self.right.append(layer, key, value)
        length = self.right.length
        if length <= 8:
            return keys, values
        shown = [*range(length - 9, length - 1), *range(length, length + key.shape[2])]
        return keys[:, :, shown], values[:, :, shown]

    def positions(self) -> IntArray:
        kept: IntArray = self.right.positions()[-8:]
        return kept


WRONG: dict[Callable[..., Any], str] = {
    Swapped: "chunked = single",
    KeepsWhatIsCropped: "rewound = uncached",
    SharedFork: "forked = uncached",
    MixesRows: "batched = alone",
    ForgetsInSecret: "cached = uncached",
    NotANumber: "cached = uncached",
    Raises: "cached = uncached",
    MovesWindow: "layout = concat_bhtd",
}


class Plugin:
    """Offers the wrong layouts."""

    @hookimpl
    def miniort_cache_layouts(self) -> list[CacheLayoutInfo]:
        return [CacheLayoutInfo(each.__name__, each, lets_go=each is MovesWindow) for each in (*WRONG, WrongType, Wrong)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def decoder(data: Path) -> Decoder:
    plugins = create_plugin_manager()
    plugins.register(Plugin(), name="wrong_layouts")
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


@pytest.fixture(scope="module")
def verifier(decoder: Decoder) -> Verifier:
    return Verifier(decoder, max_context=CONTEXT, steps=6)


def failed(result: LayoutVerification) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


@pytest.mark.parametrize("layout", WRONG)
def test_wrong_layout_is_caught(verifier: Verifier, layout: type[Wrong]) -> None:
    result = verifier.verify(LayoutChoice(layout.__name__))
    assert not result.passed
    assert WRONG[layout] in failed(result)


def test_wrapper_alone_is_right(verifier: Verifier) -> None:
    """What catches the layouts above isn't the class that they're made of."""
    result = verifier.verify(LayoutChoice("Wrong"))
    assert result.passed, failed(result)


def test_swapped_concat_passes_all_checks_of_single_tokens(verifier: Verifier) -> None:
    checks = verifier.verify(LayoutChoice("Swapped")).checks
    assert {check.passed for check in checks if check.name == "cached = uncached"} == {True}
    chunked = [check for check in checks if check.name == "chunked = single"]
    assert {check.passed for check in chunked} == {False}
    assert all(check.max_error is not None and check.max_error > 100 * check.tolerance for check in chunked)


def test_an_exception_of_a_layout_is_a_failed_check_that_says_it(verifier: Verifier) -> None:
    result = verifier.verify(LayoutChoice("Raises"))
    assert all("a bug of its own" in check.note for check in result.checks if not check.passed)
    assert result.layers == ()


def test_layers_of_another_type_are_seen(verifier: Verifier) -> None:
    layers = verifier.verify(LayoutChoice("WrongType")).layers
    assert [(layer.dtype, layer.passed) for layer in layers] == [("float64", False)] * 3


def test_not_a_number_is_no_error_of_zero(verifier: Verifier) -> None:
    with np.errstate(invalid="ignore"):
        check = verifier.verify(LayoutChoice("NotANumber")).checks[1]
    assert check.max_error is not None, check.note
    assert np.isnan(check.max_error)
    assert not check.passed


@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum"])
def test_installed_layouts_are_right(data: Path, plugins: PluginManager, folder: str) -> None:
    decoder = open_decoder(data / "fixtures" / folder, plugins=plugins)
    verifier = Verifier(decoder, max_context=40, steps=6)
    usable, refused = usable_layouts(decoder)
    assert refused == {}
    for layout in [*usable, LayoutChoice("window", {"window": 8, "sinks": 2}), LayoutChoice("int8", {"block": 4})]:
        result = verifier.verify(layout)
        assert result.passed, (layout.label, [check for check in result.checks if not check.passed])
        assert len(result.layers) == decoder.binding.layers


def test_what_a_layout_let_go_of_is_not_judged_and_that_is_said(data: Path, plugins: PluginManager) -> None:
    verifier = Verifier(open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins), max_context=40, steps=6)
    long = verifier.verify(LayoutChoice("window", {"window": 8, "sinks": 0})).checks[2]
    assert long.passed
    assert "not judged from step 2 on" in long.note
    assert len(long.by_step) == 1


def test_a_tolerance_of_the_user_is_taken_as_it_is(decoder: Decoder) -> None:
    strict = Verifier(decoder, max_context=CONTEXT, tolerance=1e-12, steps=6)
    result = strict.verify(LayoutChoice("Wrong"))
    assert not result.passed, "rounding alone is more than that"
    assert {check.tolerance for check in result.checks} == {1e-12}


def test_lossy_layout_is_let_pass_by_what_it_documents_alone(data: Path, plugins: PluginManager) -> None:
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)
    lossy = Verifier(decoder, max_context=40, steps=6).verify(LayoutChoice("int8", {"block": 4}))
    exact = Verifier(decoder, max_context=40, steps=6, tolerance=1e-4).verify(LayoutChoice("int8", {"block": 4}))
    assert lossy.passed
    assert not exact.passed


def test_export_whose_decode_graph_takes_one_token_at_a_time_is_given_one(data: Path, plugins: PluginManager) -> None:
    """Optimum's older `decoder_with_past` was traced with one token: it has no mask among new tokens."""
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum_legacy", plugins=plugins)
    assert not decoder.takes_several_tokens
    assert Verifier(decoder, max_context=CONTEXT, steps=6).verify(LayoutChoice("concat_bhtd")).passed


def test_layouts_that_the_model_cannot_use_are_left_out_with_the_reason(data: Path, plugins: PluginManager) -> None:
    usable, refused = usable_layouts(open_decoder(data / "fixtures" / "gpt2_optimum_legacy", plugins=plugins))
    assert "window" not in [layout.name for layout in usable]
    assert "takes no positions" in refused["window"]


def test_what_cannot_be_verified_is_an_error(decoder: Decoder) -> None:
    with pytest.raises(PluginError, match="no cache layout is named 'nope'"):
        Verifier(decoder, max_context=CONTEXT).verify(LayoutChoice("nope"))
    with pytest.raises(GenerationError, match="more than the model's context of 128"):
        Verifier(decoder, max_context=1000)
    with pytest.raises(GenerationError, match="at least 2"):
        Verifier(decoder, max_context=1)
