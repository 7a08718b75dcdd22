"""Text generation: binding a decoder's graphs, the KV cache, the loop and the detokenizer.

Names are imported when they are first used: a plugin that needs a dataclass from here shouldn't have to wait for onnx-ir.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.lazy import lazy_exports

if TYPE_CHECKING:
    from miniort.generation.binding import DecoderBinding, GraphBinding, bind_decoder
    from miniort.generation.cache import Block, BlockedView, CacheLayoutInfo, CacheSpec, KVCache
    from miniort.generation.cache_file import fingerprint, load_cache, save_cache
    from miniort.generation.cache_names import LayerNames
    from miniort.generation.decoder import Decoder, find_source, open_decoder
    from miniort.generation.detokenizer import StreamingDetokenizer
    from miniort.generation.generator import GeneratedToken, Generator, generate, pad_left, search, tokens_left
    from miniort.generation.measurement import Measurement, Meter
    from miniort.generation.perplexity import TextLikelihood, next_token_log_probabilities, text_likelihood
    from miniort.generation.prompt_lookup import draft_from_context, generate_with_lookup
    from miniort.generation.sampling import (
        Continuation,
        LogitsProcessor,
        LogitsProcessorInfo,
        Sampler,
        SamplerInfo,
        Search,
        SearchRun,
        TokenHistory,
    )
    from miniort.generation.scores import StepScores, TokenScore, score
    from miniort.generation.sources import ChatTemplate, DecoderSource, ModelFormat, Tokenizer
    from miniort.generation.statistics import GenerationStatistics, Stopwatch, peak_memory
    from miniort.generation.stop_strings import StopStrings
    from miniort.generation.verification import Check, LayerReport, LayoutChoice, LayoutVerification, Verifier, usable_layouts

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DecoderBinding": "miniort.generation.binding",
        "GraphBinding": "miniort.generation.binding",
        "LayerNames": "miniort.generation.cache_names",
        "bind_decoder": "miniort.generation.binding",
        "Block": "miniort.generation.cache",
        "BlockedView": "miniort.generation.cache",
        "CacheLayoutInfo": "miniort.generation.cache",
        "CacheSpec": "miniort.generation.cache",
        "KVCache": "miniort.generation.cache",
        "Decoder": "miniort.generation.decoder",
        "find_source": "miniort.generation.decoder",
        "open_decoder": "miniort.generation.decoder",
        "StreamingDetokenizer": "miniort.generation.detokenizer",
        "GeneratedToken": "miniort.generation.generator",
        "Generator": "miniort.generation.generator",
        "generate": "miniort.generation.generator",
        "pad_left": "miniort.generation.generator",
        "search": "miniort.generation.generator",
        "Continuation": "miniort.generation.sampling",
        "LogitsProcessor": "miniort.generation.sampling",
        "LogitsProcessorInfo": "miniort.generation.sampling",
        "Sampler": "miniort.generation.sampling",
        "SamplerInfo": "miniort.generation.sampling",
        "Search": "miniort.generation.sampling",
        "SearchRun": "miniort.generation.sampling",
        "TokenHistory": "miniort.generation.sampling",
        "ChatTemplate": "miniort.generation.sources",
        "Architecture": "miniort.generation.sources",
        "DecoderSource": "miniort.generation.sources",
        "ModelFormat": "miniort.generation.sources",
        "Tokenizer": "miniort.generation.sources",
        "GenerationStatistics": "miniort.generation.statistics",
        "Stopwatch": "miniort.generation.statistics",
        "peak_memory": "miniort.generation.statistics",
        "fingerprint": "miniort.generation.cache_file",
        "load_cache": "miniort.generation.cache_file",
        "save_cache": "miniort.generation.cache_file",
        "TextLikelihood": "miniort.generation.perplexity",
        "next_token_log_probabilities": "miniort.generation.perplexity",
        "text_likelihood": "miniort.generation.perplexity",
        "draft_from_context": "miniort.generation.prompt_lookup",
        "generate_with_lookup": "miniort.generation.prompt_lookup",
        "StopStrings": "miniort.generation.stop_strings",
        "StepScores": "miniort.generation.scores",
        "TokenScore": "miniort.generation.scores",
        "score": "miniort.generation.scores",
        "tokens_left": "miniort.generation.generator",
        "Check": "miniort.generation.verification",
        "LayerReport": "miniort.generation.verification",
        "LayoutChoice": "miniort.generation.verification",
        "LayoutVerification": "miniort.generation.verification",
        "Verifier": "miniort.generation.verification",
        "usable_layouts": "miniort.generation.verification",
        "Measurement": "miniort.generation.measurement",
        "Meter": "miniort.generation.measurement",
    },
)

__all__ = [
    "Architecture",
    "Block",
    "BlockedView",
    "CacheLayoutInfo",
    "CacheSpec",
    "ChatTemplate",
    "Check",
    "Continuation",
    "Decoder",
    "DecoderBinding",
    "DecoderSource",
    "GeneratedToken",
    "GenerationStatistics",
    "Generator",
    "GraphBinding",
    "KVCache",
    "LayerNames",
    "LayerReport",
    "LayoutChoice",
    "LayoutVerification",
    "LogitsProcessor",
    "LogitsProcessorInfo",
    "Measurement",
    "Meter",
    "ModelFormat",
    "Sampler",
    "SamplerInfo",
    "Search",
    "SearchRun",
    "StepScores",
    "StopStrings",
    "Stopwatch",
    "StreamingDetokenizer",
    "TextLikelihood",
    "TokenHistory",
    "TokenScore",
    "Tokenizer",
    "Verifier",
    "bind_decoder",
    "draft_from_context",
    "find_source",
    "fingerprint",
    "generate",
    "generate_with_lookup",
    "load_cache",
    "next_token_log_probabilities",
    "open_decoder",
    "pad_left",
    "peak_memory",
    "save_cache",
    "score",
    "search",
    "text_likelihood",
    "tokens_left",
    "usable_layouts",
]
