"""Record what Hugging Face transformers does with logits: the oracle of the samplers' tests.

    python tools/record_sampling.py GPT2_FOLDER tests/data/sampling

GPT2_FOLDER holds the weights of tests/data/fixtures/gpt2_optimum as `model.safetensors`, with their config.json. Needs torch and
transformers; they're no dependency of miniort. Everything is seeded, and each file holds the versions that it was made with.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation import logits_process as hf

BATCHES, ROWS, VOCABULARY, TIME, PROMPT = 60, 3, 40, 12, 5
END_TOKENS = (3, 11)
VERSIONS = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})


def random_logits(rng: np.random.Generator, batch: int) -> np.ndarray:
    """Logits [rows, vocabulary]: narrow, ordinary and wide ones; every third batch has ties, every fourth tokens that are ruled out."""
    logits = rng.standard_normal((ROWS, VOCABULARY)) * (0.5, 1.0, 3.0, 8.0, 30.0)[batch % 5]
    if batch % 3 == 0:
        logits = np.round(logits)
    if batch % 4 == 0:
        ruled_out = rng.random(logits.shape) < 0.4
        ruled_out[:, 0] = False
        logits[ruled_out] = -np.inf
    return logits.astype(np.float32)


def options_of(name: str, batch: int, rng: np.random.Generator) -> Any:
    """The option that a processor gets for a batch; JSON."""
    choices: dict[str, Sequence[Any]] = {
        "temperature": (0.1, 0.7, 1.0, 1.3, 5.0),
        "top_k": (1, 2, 5, 39, 40, 100),
        "top_p": (1e-8, 0.1, 0.5, 0.9, 0.95, 0.999, 0.0),
        "min_p": (0.0, 0.02, 0.1, 0.5, 1.0),
        "typical_p": (0.1, 0.3, 0.5, 0.9, 0.99),
        "epsilon": (1e-4, 3e-3, 0.02, 0.3, 0.9),
        "eta": (1e-4, 3e-3, 0.02, 0.3, 0.9),
        "repetition_penalty": (0.5, 1.0, 1.2, 2.0),
        "frequency_penalty": (-1.0, 0.0, 0.3, 2.0),
        "presence_penalty": (-1.0, 0.0, 0.3, 2.0),
        "no_repeat_ngram": (1, 2, 3, 4),
        "min_new_tokens": (0, 6, 7, 8, 20),
    }
    if name in choices:
        return choices[name][batch % len(choices[name])]
    if name == "logit_bias":
        tokens = rng.choice(VOCABULARY, size=5, replace=False)
        return {int(token): float(np.float32(bias)) for token, bias in zip(tokens, rng.normal(0, 5, 5), strict=True)}
    return [rng.integers(6, size=int(length)).tolist() for length in rng.integers(1, 4, size=5)]  # bad words


def by_count(weigh: Callable[[int], float], tokens: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """OpenAI's penalties, which transformers hasn't: counted here, and added by its bias of single tokens."""
    rows = []
    for row, scores in zip(tokens[:, PROMPT:].tolist(), logits, strict=True):
        biases = {(token,): -weigh(count) for token, count in Counter(row).items()}
        rows.append(hf.SequenceBiasLogitsProcessor(biases)(torch.tensor([row]), scores[None])[0])
    return torch.stack(rows)


def processed(name: str, option: Any, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Logits behind the processor of transformers: tokens [rows, time], logits [rows, vocabulary] -> logits."""
    given, scores = torch.from_numpy(tokens), torch.from_numpy(logits.copy())
    makers: dict[str, Callable[[], Any]] = {
        "temperature": lambda: hf.TemperatureLogitsWarper(option),
        "top_k": lambda: hf.TopKLogitsWarper(option),
        "top_p": lambda: hf.TopPLogitsWarper(option),
        "min_p": lambda: hf.MinPLogitsWarper(option),
        "typical_p": lambda: hf.TypicalLogitsWarper(option),
        "epsilon": lambda: hf.EpsilonLogitsWarper(option),
        "eta": lambda: hf.EtaLogitsWarper(option),
        "repetition_penalty": lambda: hf.RepetitionPenaltyLogitsProcessor(option),
        "no_repeat_ngram": lambda: hf.NoRepeatNGramLogitsProcessor(option),
        "min_new_tokens": lambda: hf.MinNewTokensLengthLogitsProcessor(PROMPT, option, list(END_TOKENS)),
        "logit_bias": lambda: hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in option.items()}),
        "bad_words": lambda: hf.NoBadWordsLogitsProcessor(option, list(END_TOKENS)),
    }
    if name == "frequency_penalty":
        result = by_count(lambda count: option * count, tokens, scores)
    elif name == "presence_penalty":
        result = by_count(lambda count: option, tokens, scores)
    else:
        result = makers[name]()(given, scores)
    return result.numpy()


NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon", "eta", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "no_repeat_ngram", "min_new_tokens", "logit_bias", "bad_words"),
)
CHANGING = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
"""Processors that change logits; the others only rule some out, and which is all that's recorded."""


def record_processors(target: Path) -> None:
    """Every processor, and argmax as greedy search does it, on the same random batches."""
    rng = np.random.default_rng(20)
    logits = np.stack([random_logits(rng, batch) for batch in range(BATCHES)])  # [batches, rows, vocabulary]
    tokens = rng.integers(6, size=(BATCHES, ROWS, TIME))  # few different ones, so that they repeat
    arrays: dict[str, Any] = {"logits": logits, "tokens": tokens.astype(np.int8), "prompt_length": PROMPT, "end_tokens": END_TOKENS}
    arrays["greedy"] = torch.argmax(torch.from_numpy(logits), dim=-1).numpy()
    options: dict[str, list[Any]] = {}
    for name in NAMES:
        options[name] = [options_of(name, batch, rng) for batch in range(BATCHES)]
        found = np.stack([processed(name, *each) for each in zip(options[name], tokens, logits, strict=True)])
        arrays[name] = found if name in CHANGING else np.packbits(found > -np.inf)
    np.savez_compressed(target, versions=VERSIONS, options=json.dumps(options), **arrays)


def record_beams(folder: Path, target: Path) -> None:
    """Beam search over a GPT-2 with small weights: tokens and scores of all beams, behind prompts of several lengths."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    rng = np.random.default_rng(21)
    batches = [[rng.integers(3, 512, length).tolist() for length in lengths] for lengths in ((4,), (3, 7), (9, 2, 5))]
    settings = itertools.product(
        (2, 4), (-0.5, 1.0, 2.5), (False, True, "never"), ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2})
    )
    cases, arrays = [], {}
    for (beams, penalty, early, processors), rows in itertools.product(settings, batches):
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        if processors and len(rows) > 1:
            continue  # transformers counts padding as text there
        shared = dict(attention_mask=mask, num_beams=beams, max_new_tokens=14, pad_token_id=0, do_sample=False, **processors)
        with torch.no_grad():
            # Tokens that the search would go through anyway end it, at several lengths.
            likely = Counter(model.generate(ids, **shared, eos_token_id=511)[:, longest + 4 :].flatten().tolist())
            ends = sorted(token for token, _ in likely.most_common(3))[: 1 + len(cases) % 3]
            found = model.generate(
                ids, **shared, eos_token_id=ends, length_penalty=penalty, early_stopping=early, num_return_sequences=beams,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        number = len(cases)
        arrays[f"tokens_{number}"] = found.sequences[:, longest:].numpy().astype(np.int16)
        arrays[f"scores_{number}"] = found.sequences_scores.numpy()
        cases.append(
            {"rows": rows, "num_beams": beams, "length_penalty": penalty, "early_stopping": early, "end_tokens": ends, **processors}
        )
    np.savez_compressed(target, versions=VERSIONS, cases=json.dumps(cases), max_new_tokens=14, **arrays)


def main() -> None:
    """Read the arguments and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpt2", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.target.mkdir(parents=True, exist_ok=True)
    record_processors(arguments.target / "processors.npz")
    record_beams(arguments.gpt2, arguments.target / "beams.npz")


if __name__ == "__main__":
    main()
