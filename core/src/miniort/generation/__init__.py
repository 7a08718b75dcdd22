"""Text generation: binding a decoder's graphs, the KV cache, the loop and the detokenizer.

Names are imported when they are first used: a plugin that needs a dataclass from here shouldn't have to wait for onnx-ir.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.lazy import lazy_exports

if TYPE_CHECKING:
    from miniort.generation.binding import DecoderBinding, GraphBinding, LayerNames, bind_decoder
    from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache
    from miniort.generation.decoder import Decoder, find_source, open_decoder
    from miniort.generation.detokenizer import StreamingDetokenizer
    from miniort.generation.generator import GeneratedToken, Generator, generate, pad_left
    from miniort.generation.sampling import LogitsProcessor, LogitsProcessorInfo, Sampler, SamplerInfo
    from miniort.generation.sources import DecoderSource, ModelFormat, Tokenizer
    from miniort.generation.statistics import GenerationStatistics, Stopwatch, peak_memory

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DecoderBinding": "miniort.generation.binding",
        "GraphBinding": "miniort.generation.binding",
        "LayerNames": "miniort.generation.binding",
        "bind_decoder": "miniort.generation.binding",
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
        "LogitsProcessor": "miniort.generation.sampling",
        "LogitsProcessorInfo": "miniort.generation.sampling",
        "Sampler": "miniort.generation.sampling",
        "SamplerInfo": "miniort.generation.sampling",
        "DecoderSource": "miniort.generation.sources",
        "ModelFormat": "miniort.generation.sources",
        "Tokenizer": "miniort.generation.sources",
        "GenerationStatistics": "miniort.generation.statistics",
        "Stopwatch": "miniort.generation.statistics",
        "peak_memory": "miniort.generation.statistics",
    },
)

__all__ = [
    "CacheLayoutInfo",
    "CacheSpec",
    "Decoder",
    "DecoderBinding",
    "DecoderSource",
    "GeneratedToken",
    "GenerationStatistics",
    "Generator",
    "GraphBinding",
    "KVCache",
    "LayerNames",
    "LogitsProcessor",
    "LogitsProcessorInfo",
    "ModelFormat",
    "Sampler",
    "SamplerInfo",
    "Stopwatch",
    "StreamingDetokenizer",
    "Tokenizer",
    "bind_decoder",
    "find_source",
    "generate",
    "open_decoder",
    "pad_left",
    "peak_memory",
]
