"""Reading entries of a parsed `config.json`, where what is missing or odd is a ModelError that names the entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniort.errors import ModelError


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above 0; ModelError if it's absent (or null) and there's no default."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {name}, which says how the model is built; get the file again")
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {name} must be a whole number above 0, found {value!r}")
    return value


def optional_integer(config: Mapping[str, Any], name: str) -> int | None:
    """A whole number above 0, or None where it's absent or null."""
    return None if config.get(name) is None else integer(config, name)


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number above 0."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"config.json: {name} must be a number above 0, found {value!r}")
    return float(value)


def optional_number(config: Mapping[str, Any], name: str) -> float | None:
    """A finite number above 0, or None where it's absent or null."""
    return None if config.get(name) is None else number(config, name, 1.0)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    value = config.get(name, default)
    if type(value) is not bool:
        raise ModelError(f"config.json: {name} must be true or false, found {value!r}")
    return value


def require(config: Mapping[str, Any], computed: Mapping[str, tuple[Any, ...]]) -> None:
    """ModelError if an entry has another value than those that the graphs compute; the first is what an absent entry means."""
    for name, values in computed.items():
        if config.get(name, values[0]) not in values:
            wanted = " or ".join(map(repr, values))
            raise ModelError(f"config.json has {name}={config[name]!r}; the {config.get('model_type')} graphs compute {wanted}")


def multiple(name: str, value: int, of_name: str, of: int) -> None:
    """ModelError unless `value` is a multiple of `of`."""
    if value % of:
        raise ModelError(f"config.json: {name}={value} has to be a multiple of {of_name}={of}")
