"""Which layer's key or value a tensor is, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miniort.errors import BindingError

KEY_WORDS = frozenset({"key", "keys", "k", "kcache", "keycache"})
VALUE_WORDS = frozenset({"value", "values", "v", "vcache", "valuecache"})

_ROLE = re.compile(r"(past|present)\.(\d+)(?:\.(key|value))?")


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's key and value. Where both are packed in one tensor [2, batch, kv heads, time, head dim] they're equal."""

    key: str
    value: str

    @property
    def packed(self) -> bool:
        """Whether one tensor holds both."""
        return self.key == self.value


def is_cache_role(role: str) -> bool:
    """Whether a role is a place in the cache: `past.0.key`, `present.3.value`, or `past.0` where both are packed in one tensor."""
    return _ROLE.fullmatch(role) is not None


def named_places(overrides: Mapping[str, str], noun: str) -> dict[str, tuple[int, str | None]]:
    """Layer and kind of the names that the user gave for `past` or `present`; the kind is None for a packed one."""
    matches = ((_ROLE.fullmatch(role), name) for role, name in overrides.items())
    return {name: (int(match[2]), match[3]) for match, name in matches if match is not None and match[1] == noun}


def kind_of(name: str) -> str | None:
    """`key` or `value` by the last such word of a name; `past_key_values` itself says neither."""
    words = _words(re.sub(r"past_?key_?values?", "past", name.lower()))
    for word in reversed(words):
        if word in KEY_WORDS:
            return "key"
        if word in VALUE_WORDS:
            return "value"
    return None


def group_layers(names: Sequence[str], packed: bool, noun: str, given: Mapping[str, tuple[int, str | None]]) -> tuple[LayerNames, ...]:
    """Names of cache tensors by layer.

    packed: whether each holds key and value. given: layer and kind of those that the user named. BindingError if the others' names don't
    tell, that says how to.
    """
    if not names:
        return ()
    listed = ", ".join(names)
    if packed:
        layers = [given[name][0] for name in names] if set(names) <= set(given) else _layer_numbers(names)
        if layers is None or sorted(layers) != list(range(len(names))):
            raise BindingError(f"the layers of the packed {noun} can't be told from the names: {listed}. Name each: --bind {noun}.0=NAME …")
        return tuple(LayerNames(name, name) for _, name in sorted(zip(layers, names, strict=True)))
    by_kind: dict[str, list[str]] = {"key": [], "value": []}
    for name in names:
        kind = given[name][1] if name in given else kind_of(name)
        if kind is None:
            raise BindingError(f"{noun} {name!r} is called neither key nor value; seen: {listed}. Name each: --bind {noun}.0.key=NAME …")
        by_kind[kind].append(name)
    if len(by_kind["key"]) != len(by_kind["value"]):
        raise BindingError(f"{noun} has {len(by_kind['key'])} keys and {len(by_kind['value'])} values: {listed}")
    places: dict[str, dict[int, str]] = {}
    for kind, each in by_kind.items():
        layers = [given[name][0] for name in each] if set(each) <= set(given) else _layer_numbers(each)
        if layers is None:
            raise BindingError(f"the layers of the {noun} can't be told from the names: {listed}. Name each: --bind {noun}.0.key=NAME …")
        places[kind] = dict(zip(layers, each, strict=True))
    wanted = list(range(len(by_kind["key"])))
    if sorted(places["key"]) != wanted or sorted(places["value"]) != wanted:
        raise BindingError(f"the {noun} doesn't have a key and a value for each layer from 0: {listed}")
    return tuple(LayerNames(places["key"][layer], places["value"][layer]) for layer in wanted)


def _words(name: str) -> list[str]:
    """`past_key_values.0.key` -> [past, key, values, 0, key]: runs of letters and runs of digits."""
    return re.findall(r"[a-z]+|\d+", name.lower())


def _layer_numbers(names: Sequence[str]) -> list[int] | None:
    """The layer that each name speaks of, None if they don't say.

    `qwen2_5.layers.0.key` has three numbers: the layer is the one behind the word layer; else the last one that counts 0, 1, 2, … . Layers
    that are counted from 1 are numbered from 0.
    """
    after_layer = [re.search(r"layers?[^a-z0-9]*(\d+)", name.lower()) for name in names]
    if all(after_layer):
        return _from_zero([int(match.group(1)) for match in after_layer if match])
    numbers = [[int(word) for word in _words(name) if word.isdigit()] for name in names]
    if len(names) == 1:
        return [0]
    if len({len(each) for each in numbers}) != 1:
        return None
    for place in reversed(range(len(numbers[0]))):
        column = _from_zero([each[place] for each in numbers])
        if sorted(column) == list(range(len(names))):
            return column
    return None


def _from_zero(layers: list[int]) -> list[int]:
    return [layer - 1 for layer in layers] if sorted(layers) == list(range(1, len(layers) + 1)) and len(layers) > 1 else layers
