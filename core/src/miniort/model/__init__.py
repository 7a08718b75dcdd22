"""Loading models: the file, its external data, and the store that weights are shared through."""
