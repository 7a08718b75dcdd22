"""Record the logits that Hugging Face transformers computes from a GGUF file: the oracle of the tests with a real model.

    python tools/record_gguf_logits.py MODEL.gguf tests/data/smollm2/logits.npz

Needs torch, transformers and gguf; the first two are no dependency of miniort. transformers dequantises the weights to float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

PROMPTS = {
    "chat": (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "story": "Once upon a time, there was a little",
}
TOP, PLACES, GREEDY = 64, 256, 24


def main() -> None:
    """Write, for each prompt: its ids, the likeliest tokens of the last position, logits of all positions at some places, greedy tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    folder, name = str(arguments.gguf.parent), arguments.gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    places = np.random.default_rng(0).choice(model.config.vocab_size, PLACES, replace=False)
    recorded = {"places": np.sort(places)}
    for key, prompt in PROMPTS.items():
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0].numpy()
            greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY, do_sample=False)[0, ids.shape[1] :]
        top = np.argsort(-logits[-1], kind="stable")[:TOP]
        recorded |= {
            f"{key}.ids": ids[0].numpy(),
            f"{key}.top_ids": top,
            f"{key}.top_logits": logits[-1, top],
            f"{key}.logits": logits[:, recorded["places"]],
            f"{key}.greedy": greedy.numpy(),
        }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "model": name, "prompts": PROMPTS}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.output, **recorded, about=np.array(json.dumps(versions)))


if __name__ == "__main__":
    main()
