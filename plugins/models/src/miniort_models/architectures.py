"""The architectures whose graphs this package writes, and how one is found among those that plugins offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniort.errors import ModelError
from miniort.generation.sources import Architecture
from miniort.plugins import collect_mapping
from miniort_models.graphs import gemma, gpt2, gpt_neox, llama

if TYPE_CHECKING:
    from miniort.plugins import PluginManager

ARCHITECTURES = (
    Architecture("gpt2", gpt2.build, summary="GPT-2"),
    Architecture("gpt_neox", gpt_neox.build, summary="GPT-NeoX, Pythia"),
    Architecture("llama", llama.build, summary="Llama, SmolLM"),
    Architecture("mistral", llama.build, summary="Mistral"),
    Architecture("qwen2", llama.build, summary="Qwen2, Qwen2.5"),
    Architecture("qwen3", llama.build, summary="Qwen3"),
    Architecture("phi3", llama.build, summary="Phi-3, Phi-3.5, Phi-4-mini"),
    Architecture("gemma2", gemma.build_gemma2, summary="Gemma 2"),
    Architecture("gemma3_text", gemma.build_gemma3, summary="Gemma 3, text only"),
    Architecture("gemma3", gemma.build_seeing_gemma3, summary="Gemma 3 that sees images, of which the language model is taken"),
)
"""Every architecture of this package."""


def find_architecture(config: Mapping[str, Any], source: str, plugins: PluginManager) -> Architecture:
    """The architecture that `config.json` names. source: whose config it is.

    ModelError that lists those that there are, and says how one is added.
    """
    known = collect_mapping(plugins, "miniort_architectures", Architecture)
    name = config.get("model_type")
    if name in known:
        return known[name]
    found = f"is of the architecture {name!r}" if name else "has no model_type in its config.json"
    there_are = ", ".join(sorted(known)) or "none"
    raise ModelError(f"{source} {found}; graphs can be written for {there_are}. A plugin adds others by the hook miniort_architectures")
