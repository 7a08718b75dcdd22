"""Record how GPT-2's own tokenizer, in plain Python, splits texts: the oracle of the test with its vocabulary.

    python tools/record_gpt2_tokens.py VOCAB.json MERGES.txt tests/data/gpt2_tokens.json

The two files are GPT-2's (50,257 tokens). Needs transformers, which is no dependency of miniort; its `GPT2Tokenizer` is OpenAI's code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

CORPUS = [
    "a  b",
    "\n\n x",
    "it 's",
    "",
    "\n",
    "   ",
    "The quick brown fox jumps over the lazy dog. It's 12:30, and I'd say they've seen 1,024 of 'em!",
    "I'LL they'd you're 'tis can't 12345 1,000.50 C++ #hashtag @user https://example.org/a_b?c=d&e",
    "def f(x: int) -> int:\n    return x ** 2  # a comment\n\n\nfor i in range(10):\n\tprint(f'{i=}')\n",
    "<html lang=\"en\">\n  <body class='x'>&nbsp;</body>\r\n</html>\r\n\r\n",
    "SELECT name, COUNT(*) FROM users WHERE id != 0x1F GROUP BY 1; -- done",
    " leading, trailing  and   inner    spaces \t\t tabs \r\n\r\n lines \n \n end ",
    "naïve café, Ünïcödé, Ελληνικά, русский язык, العربية, עברית, हिन्दी ១២៣ ½² Ⅷ",
    "日本語の文章と、中文的句子。한국어 문장도 있습니다。全角　スペース",
    "😀😃 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff zero\u00a0width \u2028 \x00\x7f\x85 \U0001f1e6",
    "antidisestablishmentarianism SolidGoldMagikarp aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ----------------",
]


def main() -> None:
    """Write the texts with their ids."""
    vocabulary, merges, output = sys.argv[1:]
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges)
    cases = [{"text": text, "ids": tokenizer.encode(text)} for text in CORPUS]
    content = {"transformers": transformers.__version__, "cases": cases}
    Path(output).write_text(json.dumps(content, ensure_ascii=True, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
