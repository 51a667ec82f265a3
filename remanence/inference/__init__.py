"""Inference: reading, sessions, generation, decoding, memory files."""
