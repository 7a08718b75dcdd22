"""The entry point of miniort-samplers. Nothing that costs start-up time is imported before a hook is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.plugins import hookimpl

if TYPE_CHECKING:
    from miniort.generation.sampling import LogitsProcessorInfo, SamplerInfo


@hookimpl
def miniort_samplers() -> list[SamplerInfo]:
    """The samplers of this package, and beam search."""
    from miniort.generation.sampling import SamplerInfo
    from miniort_samplers.beam import beam
    from miniort_samplers.categorical import categorical
    from miniort_samplers.greedy import greedy

    return [
        SamplerInfo("greedy", create=greedy, summary="the likeliest token, always"),
        SamplerInfo("categorical", create=categorical, summary="a token drawn with its probability"),
        SamplerInfo("beam", create=beam, summary="the likeliest whole continuations, by beam search"),
    ]


@hookimpl
def miniort_logits_processors() -> list[LogitsProcessorInfo]:
    """The logits processors of this package: what the text has already, what may not follow, then how to draw."""
    from miniort.generation.sampling import LogitsProcessorInfo
    from miniort_samplers.forbidding import bad_words, min_new_tokens, no_repeat_ngram
    from miniort_samplers.grammar import grammar
    from miniort_samplers.logit_bias import logit_bias
    from miniort_samplers.penalties import frequency_penalty, presence_penalty, repetition_penalty
    from miniort_samplers.temperature import temperature
    from miniort_samplers.truncation import epsilon, eta, min_p, top_k, top_p, typical_p

    return [
        LogitsProcessorInfo("logit_bias", logit_bias, 1500, "adds to the logits of single tokens"),
        LogitsProcessorInfo("repetition_penalty", repetition_penalty, 1400, "scales the logits of tokens that are in the text"),
        LogitsProcessorInfo("frequency_penalty", frequency_penalty, 1300, "lowers tokens by how often they were generated"),
        LogitsProcessorInfo("presence_penalty", presence_penalty, 1200, "lowers tokens that were generated"),
        LogitsProcessorInfo("no_repeat_ngram", no_repeat_ngram, 1100, "no run of tokens twice"),
        LogitsProcessorInfo("bad_words", bad_words, 1000, "runs of tokens that must not be generated"),
        LogitsProcessorInfo("min_new_tokens", min_new_tokens, 900, "no end before so many tokens"),
        LogitsProcessorInfo("grammar", grammar, 800, "only text of a JSON schema, a regular expression or a list"),
        LogitsProcessorInfo("temperature", temperature, 700, "divides logits"),
        LogitsProcessorInfo("top_k", top_k, 600, "the k likeliest tokens"),
        LogitsProcessorInfo("top_p", top_p, 500, "the likeliest tokens whose probabilities reach p"),
        LogitsProcessorInfo("min_p", min_p, 400, "tokens at least p times as likely as the likeliest"),
        LogitsProcessorInfo("typical_p", typical_p, 300, "the most typical tokens whose probabilities reach p"),
        LogitsProcessorInfo("epsilon", epsilon, 200, "tokens at least as likely as the cutoff"),
        LogitsProcessorInfo("eta", eta, 100, "tokens at least as likely as a cutoff that follows the entropy"),
    ]
