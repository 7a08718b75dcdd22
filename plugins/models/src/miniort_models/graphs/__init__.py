"""ONNX graphs of decoders, built from a configuration and weights; one file for each architecture."""
