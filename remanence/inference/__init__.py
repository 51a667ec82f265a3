"""Inference: reading of texts, sessions, text generation, fast decoding, and memory files."""
