"""The KV cache's layout where nobody names one. By itself, so that a command's help needn't wait for NumPy."""

DEFAULT_LAYOUT = "static"
"""Written in place, and it grows by itself. Layouts that copy the cache take up to 20 ms more a token with GPT-2 small at 900 tokens."""
