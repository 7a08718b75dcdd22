"""Decoders for miniort: where they come from, their tokenizers, and a demo model."""
