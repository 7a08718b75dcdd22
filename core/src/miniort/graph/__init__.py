"""Graph passes: what they are, and the ones that every session runs."""
