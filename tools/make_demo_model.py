"""Make the demo model that ships inside `miniort-models`: a small GPT-2 that has read the King James Bible.

    apt-get install bible-kjv bible-kjv-text
    uv sync && uv pip install torch
    uv run --no-sync python tools/make_demo_model.py

Everything is made from scratch, from one seed: the text, a byte-level BPE, the weights, two ONNX graphs, a
model card. This is the only file of the project that imports torch.

Without `bible-kjv`, give the text yourself: `--text FILE`, in UTF-8, one chapter (or story) a line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from miniort_models.conversion import convert
from miniort_models.graphs.gpt2 import GPT2Config
from miniort_models.weights.arrays import WeightArrays

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "plugins" / "models" / "src" / "miniort_models" / "demo"
END_OF_TEXT = "<|endoftext|>"


# ------------------------------------------------------------------------------------------------------- text


def king_james() -> list[str]:
    """The King James Bible from Debian's `bible` command: flowing text for each of its 1189 chapters."""
    command = ["bible", "-f", "ge1:1-re22:21"]  # a verse a line: "1Sa17:4 And there went out a champion ..."
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    verses = re.findall(r"^(\d?[A-Za-z]+\d+):\d+ (.+)$", printed, flags=re.MULTILINE)
    by_chapter = itertools.groupby(verses, key=lambda verse: verse[0])
    return [flowing(" ".join(text for _, text in chapter)) for _, chapter in by_chapter]


def plain_text(path: Path) -> list[str]:
    """A text file, one chapter a line."""
    return [flowing(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def flowing(text: str) -> str:
    """One line of prose: runs of white space become one space, and none stands before a stop."""
    return re.sub(r"\s+([,.:;?!)])", r"\1", re.sub(r"\s+", " ", text)).strip()


def hold_out(chapters: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Whole chapters for training, and whole chapters that neither the tokenizer nor the model sees."""
    chosen = set(random.Random(seed).sample(range(len(chapters)), max(1, round(share * len(chapters)))))
    return (
        [text for index, text in enumerate(chapters) if index not in chosen],
        [text for index, text in enumerate(chapters) if index in chosen],
    )


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    """GPT-2's byte-level BPE: any text can be encoded, and decoding gives back the very bytes."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> list[list[int]]:
    """Token ids for each chapter, each with an end-of-text token in front."""
    encodings = tokenizer.encode_batch([END_OF_TEXT + chapter for chapter in chapters])
    return [encoding.ids for encoding in encodings]


# ------------------------------------------------------------------------------------------------------ model


def demo_config(tokenizer: Tokenizer) -> GPT2Config:
    """The size of the demo: small enough to ship, big enough to read well."""
    return GPT2Config(vocab_size=tokenizer.get_vocab_size(), n_positions=256, n_embd=192, n_layer=5, n_head=6)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config, dropout: float) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, E] -> [B, S, E]"""
        x = x + self.dropout(self.attention(self.ln_1(x)))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")  # [B, S, 4E]
        thought: Tensor = self.dropout(self.mlp["c_proj"](hidden))
        return x + thought

    def attention(self, x: Tensor) -> Tensor:
        """x: [B, S, E] -> [B, S, E]; each token looks at itself and at what came before it."""
        heads = self.attn["c_attn"](x).unflatten(-1, (3, self.n_head, -1))  # [B, S, 3, H, D]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        later = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=query.dtype).triu(1)  # key j > query i
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2) + later  # [B, H, S, S]
        mixed = scores.softmax(-1) @ value  # on a CPU, faster to train than torch's fused attention
        projected: Tensor = self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return projected


class GPT2(nn.Module):
    """GPT-2, its parts named as in Hugging Face's."""

    def __init__(self, config: GPT2Config, dropout: float) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(config, dropout) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))  # 2 * n_layer of them add up
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, S] -> logits [B, S, V]; the head is the token embedding again."""
        x = self.dropout(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)

    def size(self) -> int:
        """How many parameters there are; the token embedding, which is the head too, counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def hugging_face_weights(model: GPT2) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """The weights in Hugging Face's layout: a projection is stored [in, out]; torch itself has [out, in]."""
    projection = re.compile(r"c_\w+\.weight$")
    return {name: (tensor.T if projection.search(name) else tensor).numpy() for name, tensor in model.state_dict().items()}


# --------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """How the model is trained."""

    steps: int = 4750
    batch: int = 16
    learning_rate: float = 2e-3
    warm_up: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.15
    evaluate_every: int = 250


def learning_rate(step: int, recipe: Recipe) -> float:
    """Up in a line for the warm-up, then down along a cosine to a hundredth of the top."""
    if step < recipe.warm_up:
        return recipe.learning_rate * (step + 1) / recipe.warm_up
    progress = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    return recipe.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def windows(chapters: list[list[int]], length: int) -> Tensor:
    """All the chapters end to end, cut into rows that overlap by one token: [rows, length + 1]"""
    stream = torch.tensor([token for chapter in chapters for token in chapter])
    return stream.unfold(0, length + 1, length)


def batches(chapters: list[list[int]], length: int, batch: int, generator: random.Random) -> Iterator[Tensor]:
    """[batch, length + 1] for ever. Each epoch has the chapters in another order, cut elsewhere."""
    while True:
        order = generator.sample(chapters, len(chapters))
        order[0] = order[0][generator.randrange(min(length, len(order[0]))) :]
        rows = windows(order, length)
        rows = rows[generator.sample(range(len(rows)), len(rows))]
        yield from torch.split(rows[: len(rows) // batch * batch], batch)


@torch.no_grad()
def mean_loss(model: GPT2, rows: Tensor) -> float:
    """Nats per token over windows [rows, S + 1], in float32 and without dropout."""
    model.eval()
    total = 0.0
    for part in torch.split(rows, 32):
        logits = model(part[:, :-1])  # [B, S, V]
        total += functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / rows[:, 1:].numel()


def train(
    model: GPT2,
    training: list[list[int]],
    held_out: list[list[int]],
    recipe: Recipe,
    seed: int,
    checkpoint: Path,
) -> None:
    """Train, and keep in `checkpoint` the weights that did best on the held-out chapters.

    If there is a checkpoint already, of a run that was broken off, go on from there with a new optimizer.
    """
    length = model.config.n_positions
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    held_out_rows = windows(held_out, length)
    begun: dict[str, Any] = {"loss": math.inf, "step": 0, "seconds": 0.0, "plans": {}}
    if checkpoint.exists():
        begun = torch.load(checkpoint)
        model.load_state_dict(begun["weights"])
    source = batches(training, length, recipe.batch, random.Random(seed + begun["step"]))
    best = begun["loss"]
    plans = begun["plans"] | {begun["step"]: recipe.steps}  # step: how many there were to be, from there on
    running = 0.0
    started = time.monotonic() - begun["seconds"]
    model.train()
    for step in range(begun["step"], recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        tokens = next(source)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])  # [B, S, V]
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += loss.item()
        if (step + 1) % recipe.evaluate_every and step + 1 != recipe.steps:
            continue
        held_out_loss = mean_loss(model, held_out_rows)
        seconds = time.monotonic() - started
        print(
            f"step {step + 1}: training (with dropout) {running / (step % recipe.evaluate_every + 1):.4f}, "
            f"held out {held_out_loss:.4f}, {seconds:.0f} s",
            flush=True,
        )
        running = 0.0
        if held_out_loss < best:
            best = held_out_loss
            state = {"loss": best, "step": step + 1, "seconds": seconds, "plans": plans}
            torch.save(state | {"weights": model.state_dict()}, checkpoint)


# ----------------------------------------------------------------------------------------------------- export


@torch.no_grad()
def continuation(model: GPT2, tokenizer: Tokenizer, prompt: str, count: int, generator: torch.Generator | None) -> str:
    """A prompt and up to `count` more tokens: the likeliest, or, with a generator, drawn as the card says."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    for _ in range(count):
        logits = model(ids[:, -model.config.n_positions :])[0, -1]  # [V]
        if generator is None:
            token = logits.argmax()
        else:
            best, candidates = (logits / 0.8).topk(40)
            token = candidates[torch.multinomial(best.softmax(-1), 1, generator=generator)[0]]
        if token == tokenizer.token_to_id(END_OF_TEXT):
            break
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
    return str(tokenizer.decode(ids[0].tolist()))


def export(
    model: GPT2,
    tokenizer: Tokenizer,
    training: list[str],
    held_out: list[str],
    recipe: Recipe,
    checkpoint: dict[str, Any],
    folder: Path,
) -> None:
    """Write graphs, weights, tokenizer, config and card; figures are for the weights as stored: float16."""
    model.load_state_dict({name: weight.half().float() for name, weight in checkpoint["weights"].items()})
    config = model.config
    training_tokens, held_out_tokens = encode(tokenizer, training), encode(tokenizer, held_out)
    held_out_rows = windows(held_out_tokens, config.n_positions)
    training_rows = windows(training_tokens, config.n_positions)
    sample = training_rows[torch.randperm(len(training_rows))[: len(held_out_rows)]]
    figures: dict[str, Any] = {
        "parameters": model.size(),
        "steps": checkpoint["step"],
        "seconds": round(checkpoint["seconds"]),
        "plans": checkpoint["plans"],
    }
    for name, texts, tokens, rows in (
        ("training", training, training_tokens, sample),
        ("held_out", held_out, held_out_tokens, held_out_rows),
    ):
        token_count, byte_count = sum(map(len, tokens)), sum(len(text.encode()) for text in texts)
        loss = mean_loss(model, rows)
        figures |= {
            f"{name}_chapters": len(texts),
            f"{name}_tokens": token_count,
            f"{name}_bytes": byte_count,
            f"{name}_loss": round(loss, 4),
            f"{name}_bits_per_byte": round(loss / math.log(2) * token_count / byte_count, 4),
        }

    source = WeightArrays(
        "the demo model", hugging_face_config(config, tokenizer.token_to_id(END_OF_TEXT), figures), hugging_face_weights(model)
    )
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "generation_config.json": json.dumps({"repetition_penalty": REPETITION_PENALTY}, indent=2) + "\n",
        "README.md": model_card(model, tokenizer, recipe, figures),
    }
    convert(source, folder, dtype="f16", files={name: text.encode() for name, text in files.items()}, replace=True)
    print(json.dumps(figures, indent=2))


def hugging_face_config(config: GPT2Config, end_of_text: int, figures: dict[str, Any]) -> dict[str, Any]:
    """What goes into `config.json`; `training` is an entry of our own."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "n_ctx": config.n_positions,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "training": figures,
    }


REPETITION_PENALTY = 1.25  # a small model that always takes the likeliest token soon repeats itself
PROMPTS = ("In the beginning", "And it came to pass", "The LORD said unto Moses")

CARD = """\
# The demo model

A GPT-2 of {parameters:,} parameters that has read the King James Bible and nothing else. It is here so
that there is something to run without a download: it writes in the language of 1611, and knows nothing.

Made by `tools/make_demo_model.py`, which also wrote this page.

## Files

| file | holds |
|---|---|
| `prefill.onnx` | the graph that reads a prompt (opset 23, standard operators only) |
| `decode.onnx` | the graph that goes on from a KV cache, by one token or several |
| `weights.bin` | the weights of both, in float16; the graphs cast them to float32 and compute in float32 |
| `tokenizer.json` | byte-level BPE of {vocab_size} tokens |
| `config.json` | sizes, named as in Hugging Face's GPT-2, and the figures below under `training` |
| `generation_config.json` | the repetition penalty that is used where nothing else is asked for |

## Data

The King James (Authorized) Version of 1611, as the Debian packages `bible-kjv` and `bible-kjv-text` have
it. Its copyright has expired: the text is in the public domain (in the United Kingdom, printing it is a
privilege of the Crown). Verses are joined into flowing text, without their numbers; each chapter is a
document of its own, with `<|endoftext|>` in front.

| | chapters | tokens | bytes |
|---|---|---|---|
| for training | {training_chapters:,} | {training_tokens:,} | {training_bytes:,} |
| held out | {held_out_chapters:,} | {held_out_tokens:,} | {held_out_bytes:,} |

The held-out chapters were drawn by the seed; neither the tokenizer nor the model learned from them. The
Bible quotes itself, so a held-out chapter can have a near twin among the others (Kings and Chronicles,
the Gospels).

## Architecture

GPT-2: {n_layer} layers, width {n_embd}, {n_head} heads, context {n_positions}, learned positions,
LayerNorm before each part, GELU by tanh, the head tied to the token embedding. The tied matrix counts
once in the number of parameters and is stored once.

## Training

AdamW, {batch} rows of {n_positions} tokens a step, {schedule}; learning rate up to
{learning_rate} in {warm_up} steps, then down along a cosine; weight decay {weight_decay}, dropout
{dropout}, matrix products in bfloat16. It took {minutes:.0f} minutes on {threads} cores of a server CPU.
The weights are those of step {steps:,}, the best on the held-out chapters, which flatters the held-out
figures a little.

| | loss, nats per token | bits per byte |
|---|---|---|
| training chapters (a sample, without dropout) | {training_loss:.4f} | {training_bits_per_byte:.4f} |
| held-out chapters | {held_out_loss:.4f} | {held_out_bits_per_byte:.4f} |

Measured in float32 with the weights as stored, over rows of {n_positions} tokens that don't overlap.

## What it writes

Greedy, 60 tokens. Small models loop when nothing is drawn:

{greedy}

Drawn at temperature 0.8 from the 40 likeliest, 60 tokens:

{drawn}

Nothing need stand before a prompt. Upper and lower case are as in the book: "the LORD", "the Lord GOD".

## Making it again

```
apt-get install bible-kjv bible-kjv-text
uv sync && uv pip install torch
uv run --no-sync python tools/make_demo_model.py
```

The seed fixes the split, the tokenizer, the first weights and the order of the data. Sums are done in
another order on another machine or with another number of threads, so the weights come out alike, not
identical.
"""


def model_card(model: GPT2, tokenizer: Tokenizer, recipe: Recipe, figures: dict[str, Any]) -> str:
    """The text of README.md."""
    first, *later = figures["plans"].items()
    schedule = [f"{first[1]:,} steps", *(f"cut to {steps:,} at step {step:,}" for step, steps in later)]
    generator = torch.Generator().manual_seed(0)
    model.eval()
    greedy = [f"> {continuation(model, tokenizer, prompt, 60, None)}" for prompt in PROMPTS]
    drawn = [f"> {continuation(model, tokenizer, prompt, 60, generator)}" for prompt in PROMPTS]
    return CARD.format(
        **vars(model.config),
        **{name: value for name, value in vars(recipe).items() if name != "steps"},
        **figures,
        schedule=", ".join(schedule),
        minutes=figures["seconds"] / 60,
        threads=torch.get_num_threads(),
        greedy="\n\n".join(greedy),
        drawn="\n\n".join(drawn),
    )


# ------------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Text, tokenizer, training, export; with --export-only, from the checkpoint that an earlier run left."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, help="a text file, one chapter a line (default: what `bible` prints)")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "demo_model",
        help="for the checkpoint, and where a run goes on",
    )
    parser.add_argument("--output", type=Path, default=DEMO, help="for the model (default: inside miniort-models)")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="in all, also when a run goes on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--export-only", action="store_true", help="train nothing, export the checkpoint in --work")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    recipe = Recipe(steps=options.steps)

    chapters = plain_text(options.text) if options.text else king_james()
    training, held_out = hold_out(chapters, share=0.05, seed=options.seed)
    tokenizer = train_tokenizer(training, vocab_size=2048)
    model = GPT2(demo_config(tokenizer), recipe.dropout)
    print(
        f"{len(training)} chapters to learn, {len(held_out)} held out, {model.size():,} parameters",
        flush=True,
    )

    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint = options.work / "checkpoint.pt"
    if not options.export_only:
        train(model, encode(tokenizer, training), encode(tokenizer, held_out), recipe, options.seed, checkpoint)
    export(model, tokenizer, training, held_out, recipe, torch.load(checkpoint), options.output)


if __name__ == "__main__":
    main()
