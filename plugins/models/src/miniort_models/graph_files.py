"""Which of a folder's ONNX files make up a decoder."""

from __future__ import annotations

from pathlib import Path

from miniort.errors import ModelError

# The graph for the prompt, then that for each step.
_OWN_PAIR = ("prefill.onnx", "decode.onnx")
_OPTIMUM_PAIR = ("decoder_model.onnx", "decoder_with_past_model.onnx")
_PAIRS = (_OWN_PAIR, _OPTIMUM_PAIR)

_MERGED = "decoder_model_merged.onnx"  # optimum's pair in one `If`, which wants to be fed more than either
_SINGLE = "model.onnx"


def find_graphs(folder: Path) -> tuple[Path, ...]:
    """The one graph, or the pair (prompt, step), in a folder or else in its sub-folder `onnx`.

    ModelError where there is none, half a pair, or more than one that could be meant.
    """
    for place in (folder, folder / "onnx"):
        names = sorted(path.name for path in place.glob("*.onnx") if path.is_file())
        if not names:
            continue
        candidates = choose_graphs(place, names)
        if len(candidates) > 1:
            listed = "; ".join(" + ".join(candidate) for candidate in candidates)
            raise ModelError(f"{place} holds several decoders: {listed}; name one file, or leave only one of them there")
        return tuple(place / name for name in candidates[0])
    expected = ", ".join([*(" + ".join(pair) for pair in _PAIRS), _SINGLE])
    raise ModelError(f"{folder} holds no decoder: looked there and in its sub-folder onnx for {expected} or one other .onnx file")


def has_graphs(folder: Path) -> bool:
    """Whether there is any ONNX file where `find_graphs` looks."""
    return any(any(place.glob("*.onnx")) for place in (folder, folder / "onnx"))


def choose_graphs(place: Path | str, names: list[str]) -> list[tuple[str, ...]]:
    """The decoders that could be meant by `names`, all the ONNX files of a place: one or several. ModelError for half a pair."""
    candidates: list[tuple[str, ...]] = [pair for pair in _PAIRS if set(pair) <= set(names)]
    if _MERGED in names and _OPTIMUM_PAIR not in candidates:
        candidates.append((_MERGED,))
    if _SINGLE in names:
        candidates.append((_SINGLE,))
    if not candidates:
        _reject_half_pairs(place, names)
        candidates = [(name,) for name in names]
    return candidates


def _reject_half_pairs(place: Path | str, names: list[str]) -> None:
    """ModelError for half a pair. `decoder_model.onnx` alone is whole: optimum names a decoder without a cache so."""
    for prompt, step in _PAIRS:
        if step in names:
            raise ModelError(f"{place} holds {step}, but {prompt} is missing: the graph that reads the prompt")
    prompt, step = _OWN_PAIR
    if prompt in names:
        raise ModelError(f"{place} holds {prompt}, but {step} is missing: the graph that runs each step after the prompt")
