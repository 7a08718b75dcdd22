"""A JSON schema as a regular expression, for schemas that say no more than one can say.

A keyword that the expression couldn't keep is refused and never left out: what matches is always valid against the schema. The reverse
doesn't hold. Keys stand in the schema's order, objects have no keys but those of the schema, a colon or a comma is followed by one space at
most, and values of which the schema says nothing are nested at most once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miniort.errors import GenerationError
from miniort_samplers.token_automaton import escape

CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
"""One character of a JSON string (RFC 8259 §7). Without \\u escapes, which could write half a surrogate pair."""

INTEGER = "-?(?:0|[1-9][0-9]*)"
SCALARS = {
    "string": f'"{CHARACTER}*"',
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?",
    "boolean": "(?:true|false)",
    "null": "null",
}
FORMATS = {
    "date": '"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"',
    "time": '"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"',
    "date-time": '"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"',
    "uuid": '"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"',
}
"""Formats as patterns: not all of their texts, but none that isn't one. Days end with the 28th, since not every month has more."""

COMMA, COLON = ", ?", ": ?"

ANNOTATIONS = frozenset({"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated"})
"""Keywords that say nothing about what is valid."""

KEYWORDS = {
    "string": {"minLength", "maxLength", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""What may stand beside each type."""


def regex_of_schema(schema: Mapping[str, Any]) -> str:
    """The regular expression of a JSON schema (draft 2020-12, or an older one's same keywords).

    GenerationError that names the place and the keyword if the schema says what can't be kept, or is none.
    """
    return _Translation(schema).regex(schema, "#", ())


class _Translation:
    """One schema that is translated. `path` names the place in messages, `within` are the references that are being followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def regex(self, schema: Any, path: str, within: tuple[str, ...]) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise GenerationError(f"the JSON schema must have an object or true at {path}, found {json.dumps(schema)}")
        said = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
        if not said:
            return _any_value(nested=1)
        if "$ref" in said:
            _only(said, {"$ref"}, path)
            return self._reference(said["$ref"], path, within)
        if "anyOf" in said:
            _only(said, {"anyOf"}, path)
            options = _non_empty(said["anyOf"], f"{path}/anyOf")
            return _either(self.regex(each, f"{path}/anyOf/{number}", within) for number, each in enumerate(options))
        if "enum" in said or "const" in said:
            return self._values(said, path)
        kinds = said.get("type", _implied_type(said))
        if kinds is None:
            _only(said, {"type"}, path)
        kinds = [kinds] if isinstance(kinds, str) else _non_empty(kinds, f"{path}/type")
        for kind in kinds:
            if kind not in KEYWORDS:
                raise GenerationError(f"the JSON schema has the type {kind!r} at {path}; there are {', '.join(KEYWORDS)}")
        _only(said, {"type"}.union(*(KEYWORDS[kind] for kind in kinds)), path)
        return _either(self._of_type(kind, said, path, within) for kind in kinds)

    def _reference(self, reference: Any, path: str, within: tuple[str, ...]) -> str:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise GenerationError(
                f"the JSON schema refers to {reference!r} at {path}; only #/…, places in the schema itself, can be followed"
            )
        if reference in within or reference == "#":
            raise GenerationError(
                f"the JSON schema's {reference} contains itself; that can be nested without end, which no regular expression can say. "
                "Write out as many levels as are wanted"
            )
        found: Any = self._root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise GenerationError(f"the JSON schema refers to {reference} at {path}, and there is no such place")
            found = found[key]
        return self.regex(found, reference, (*within, reference))

    def _values(self, said: Mapping[str, Any], path: str) -> str:
        """`enum` and `const`: the very values, written as JSON in the one way that `json.dumps` does without escaping what needs none."""
        _only(said, {"enum", "const", "type"}, path)
        values = _non_empty(said["enum"], f"{path}/enum") if "enum" in said else [said["const"]]
        if "const" in said:
            values = [value for value in values if _equal(value, said["const"])]
        if "type" in said:
            kinds = [said["type"]] if isinstance(said["type"], str) else said["type"]
            values = [value for value in values if any(_is_of_type(value, kind) for kind in kinds)]
        if not values:
            raise GenerationError(f"the JSON schema allows no value at {path}: const, enum and type exclude each other")
        return _either(escape(json.dumps(value, ensure_ascii=False, allow_nan=False)) for value in values)

    def _of_type(self, kind: str, said: Mapping[str, Any], path: str, within: tuple[str, ...]) -> str:
        if kind == "string":
            return self._string(said, path)
        if kind == "array":
            return self._array(said, path, within)
        if kind == "object":
            return self._object(said, path, within)
        return SCALARS[kind]

    def _string(self, said: Mapping[str, Any], path: str) -> str:
        if "format" in said:
            _only(said, {"type", "format", *(KEYWORDS["array"]), *(KEYWORDS["object"])}, path)
            if said["format"] not in FORMATS:
                raise GenerationError(f"the JSON schema has the format {said['format']!r} at {path}; there are {', '.join(FORMATS)}")
            return FORMATS[said["format"]]
        return f'"{CHARACTER}{_repeat(*_bounds(said, "minLength", "maxLength", path))}"'

    def _array(self, said: Mapping[str, Any], path: str, within: tuple[str, ...]) -> str:
        least, most = _bounds(said, "minItems", "maxItems", path)
        if "prefixItems" in said:
            _only(said, {"type", "prefixItems", *KEYWORDS["object"], *KEYWORDS["string"]}, path)
            items = _non_empty(said["prefixItems"], f"{path}/prefixItems")
            return rf"\[{COMMA.join(self.regex(item, f'{path}/prefixItems/{number}', within) for number, item in enumerate(items))}\]"
        if said.get("items") is False:
            most = 0
        if most == 0:
            return r"\[\]"
        item = self.regex(said.get("items", {}), f"{path}/items", within)
        several = f"{item}(?:{COMMA}{item}){_repeat(max(least - 1, 0), None if most is None else most - 1)}"
        return rf"\[{several}\]" if least else rf"\[(?:{several})?\]"

    def _object(self, said: Mapping[str, Any], path: str, within: tuple[str, ...]) -> str:
        properties, required = said.get("properties", {}), said.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
            raise GenerationError(f"the JSON schema must have an object as properties and a list as required at {path}")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise GenerationError(f"the JSON schema requires {unknown[0]!r} at {path}, and properties doesn't say what it is")
        if properties:
            pairs = [
                (f"{_key(name)}{COLON}{self.regex(value, f'{path}/properties/{name}', within)}", name in required)
                for name, value in properties.items()
            ]
            return rf"\{{{_in_order(pairs)}\}}"
        extra = said.get("additionalProperties", True)
        if extra is False or "properties" in said:
            return r"\{\}"
        # One pair at most: a second one might repeat the key of the first.
        return rf"\{{(?:{SCALARS['string']}{COLON}{self.regex(extra, f'{path}/additionalProperties', within)})?\}}"


def _key(name: str) -> str:
    return escape(json.dumps(name, ensure_ascii=False))


def _in_order(pairs: Sequence[tuple[str, bool]]) -> str:
    """Pairs in their order with commas between; those that aren't required may be left out.

    Behind the first pair that is there each further one brings its comma, so there are as many cases as pairs that can be the first.
    """
    cases = []
    for first, (pair, required) in enumerate(pairs):
        rest = "".join(f"{COMMA}{later}" if needed else f"(?:{COMMA}{later})?" for later, needed in pairs[first + 1 :])
        cases.append(pair + rest)
        if required:
            return _either(cases)
    return f"{_either(cases)}?"


def _any_value(nested: int) -> str:
    """Any JSON value, of at most that many levels of arrays and objects."""
    kinds = [SCALARS[kind] for kind in ("string", "number", "boolean", "null")]
    if nested:
        inner = _any_value(nested - 1)
        kinds.append(rf"\[(?:{inner}(?:{COMMA}{inner})*)?\]")
        kinds.append(rf"\{{(?:{SCALARS['string']}{COLON}{inner})?\}}")
    return _either(kinds)


def _either(patterns: Any) -> str:
    return f"(?:{'|'.join(patterns)})"


def _repeat(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _bounds(said: Mapping[str, Any], least: str, most: str, path: str) -> tuple[int, int | None]:
    low, high = said.get(least, 0), said.get(most)
    for bound in (low, high):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise GenerationError(f"the JSON schema must have whole numbers from 0 as {least} and {most} at {path}, found {bound!r}")
    if high is not None and low > high:
        raise GenerationError(f"the JSON schema has {least} {low} above {most} {high} at {path}")
    return low, high


def _implied_type(said: Mapping[str, Any]) -> str | None:
    """The type that keywords speak of, where a schema leaves it out."""
    return next((kind for kind, keywords in KEYWORDS.items() if keywords & said.keys()), None)


def _only(said: Mapping[str, Any], allowed: set[str], path: str) -> None:
    for keyword in said:
        if keyword not in allowed:
            raise GenerationError(
                f"the JSON schema has {keyword!r} at {path}, which grammar can't keep there; what it can: {', '.join(sorted(allowed))}"
            )


def _non_empty(values: Any, path: str) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise GenerationError(f"the JSON schema must have a list that isn't empty at {path}, found {values!r}")
    return values


def _equal(left: Any, right: Any) -> bool:
    """Whether two values are one JSON value: unlike in Python, true isn't 1."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _is_of_type(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type of JSON schema, where 1.0 is an integer."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return kind == "number" or (kind == "integer" and float(value).is_integer())
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(kind, ()))
