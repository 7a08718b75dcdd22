"""The tokenizer inside a GGUF file, made into one of the library `tokenizers`.

There are two kinds. `gpt2` is byte-level BPE with merges; how a text is split into words before is told by a name, `tokenizer.ggml.pre`.
`llama` is the BPE of SentencePiece, whose pieces have scores instead of merges, and ▁ for a space.

Sources: `llama-vocab.cpp` of llama.cpp, and the `tokenizer.json` of the models that the names stand for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniort.errors import TokenizerError
from miniort_models.fast_tokenizer import FastTokenizer
from miniort_models.gpt2_tokenizer import add_tokens, byte_level_bpe
from miniort_models.weights.gguf_header import GgufHeader

if TYPE_CHECKING:
    import tokenizers

# What a token is: its number in `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_WORD_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST_CL100K = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORD_CL100K + r"\p{N}{1,3}" + _REST_CL100K
_QWEN2 = _WORD_CL100K + r"\p{N}" + _REST_CL100K

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS_BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_REST_BY_CASE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = _WORDS_BY_CASE % ("", "") + r"\p{N}" + _REST_BY_CASE
_GPT4O = _WORDS_BY_CASE % (_CONTRACTION, _CONTRACTION) + r"\p{N}{1,3}" + _REST_BY_CASE

_GPT2, _SINGLE_DIGITS = "GPT-2's split", "GPT-2's split, each digit by itself"

_SPLITS: dict[str, str] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""What `tokenizer.ggml.pre` stands for: one of the two rules above, or a regular expression."""

_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Splits whose words are looked up as they are before any merge is tried."""

_COMPOSED = frozenset({"qwen2"})
"""Splits whose models compose characters first (NFC)."""

_BEGINS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Splits whose models want the begin token in front of a text even where the file doesn't say so."""

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|return|>")
"""Control tokens that end a text, whatever the file calls its end token: llama.cpp stops at them, too."""


def open_gguf_tokenizer(header: GgufHeader) -> FastTokenizer:
    """The tokenizer that a GGUF file's metadata hold. TokenizerError if there is none, it's damaged, or of a kind that isn't known."""
    kind = header.string("tokenizer.ggml.model")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list):
        raise TokenizerError(f"{header.path} has no tokenizer in it; name one with --tokenizer FILE")
    ids = {text: token for token, text in enumerate(tokens)}
    if kind == "gpt2":
        tokenizer = _byte_level(header, ids)
    elif kind == "llama":
        tokenizer = _sentencepiece(header, tokens, ids)
    else:
        raise TokenizerError(
            f"{header.path} has a tokenizer of the kind {kind!r}; known are gpt2 and llama; name one with --tokenizer FILE"
        )
    kinds = header.metadata.get("tokenizer.ggml.token_type") or []
    added = {text: said == _CONTROL for text, said in zip(tokens, kinds, strict=False) if said in (_CONTROL, _USER_DEFINED)}
    add_tokens(tokenizer, added)
    _add_begin_token(header, tokenizer, tokens)
    return FastTokenizer(tokenizer)


def begin_token(header: GgufHeader) -> int | None:
    """The token that begins a text, None where the file names none."""
    return header.integer("tokenizer.ggml.bos_token_id")


def end_tokens(header: GgufHeader) -> frozenset[int]:
    """All tokens that end a text or a turn: those that the file names, and control tokens that are known for it."""
    named = [header.integer(f"tokenizer.ggml.{word}_token_id") for word in ("eos", "eot", "eom")]
    tokens, kinds = header.metadata.get("tokenizer.ggml.tokens") or [], header.metadata.get("tokenizer.ggml.token_type") or []
    known = [token for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and text in TURN_ENDS]
    return frozenset([*known, *(token for token in named if token is not None)])


def special_texts(header: GgufHeader) -> dict[str, str]:
    """What chat templates call `bos_token`, `eos_token` and so on."""
    tokens = header.metadata.get("tokenizer.ggml.tokens") or []
    words = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {word: header.integer(f"tokenizer.ggml.{said}_token_id") for word, said in words.items()}
    return {word: tokens[token] for word, token in named.items() if token is not None and token < len(tokens)}


def _byte_level(header: GgufHeader, ids: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, normalizers, pre_tokenizers

    split = header.string("tokenizer.ggml.pre")
    rule = _SPLITS.get(split or "")
    if split is None or rule is None:
        found = "doesn't say how its tokenizer splits a text" if split is None else f"has a tokenizer that splits a text as {split!r} does"
        raise TokenizerError(f"{header.path} {found}; known are {', '.join(sorted(_SPLITS))}; name another with --tokenizer FILE")
    merges = [tuple(each.split(" ", 1)) for each in header.metadata.get("tokenizer.ggml.merges") or []]
    if not merges or any(len(each) != 2 for each in merges):
        raise TokenizerError(f"{header.path}: tokenizer.ggml.merges must be pairs of pieces; get the file again")
    tokenizer = byte_level_bpe(ids, merges, str(header.path), ignore_merges=split in _WHOLE_WORDS_FIRST)
    if rule == _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer])
    elif rule != _GPT2:
        words = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_as_characters])
    if split in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(header: GgufHeader, tokens: list[str], ids: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{header.path}: tokenizer.ggml.scores must have one number for each of the {len(tokens)} tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    unknown = next((text for text, kind in zip(tokens, kinds, strict=False) if kind == _UNKNOWN), None)
    model = models.BPE(ids, merges_of_scores(tokens, scores, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(decoding)
    return tokenizer


def merges_of_scores(tokens: list[str], scores: list[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that make up a piece, those of the piece with the highest score first.

    SentencePiece joins, of all neighbours whose whole is a piece, those whose whole has the highest score; BPE joins the pair that comes
    first in its list. So the list that does the same is that of all pairs, by the score of their whole.
    """
    pairs = [
        (-scores[token], token, ids[whole[:cut]], whole[:cut], whole[cut:])
        for token, whole in enumerate(tokens)
        for cut in range(1, len(whole))
        if whole[:cut] in ids and whole[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_begin_token(header: GgufHeader, tokenizer: tokenizers.Tokenizer, tokens: list[str]) -> None:
    from tokenizers import processors

    begin = begin_token(header)
    wanted = header.metadata.get("tokenizer.ggml.add_bos_token")
    if wanted is None:
        wanted = header.string("tokenizer.ggml.model") == "llama" or header.string("tokenizer.ggml.pre") in _BEGINS
    if not wanted or begin is None:
        return
    if begin >= len(tokens):
        raise TokenizerError(f"{header.path}: the begin token {begin} isn't in the vocabulary of {len(tokens)}")
    tokenizer.post_processor = processors.TemplateProcessing(single=["BEGIN", "$A"], special_tokens=[("BEGIN", begin)])
