"""Weights of decoders, whatever file they lie in."""
