"""The byte tokenizer's vocabulary, which configs know without torch."""

BYTES = 257
"""256 bytes and the end of a document."""
