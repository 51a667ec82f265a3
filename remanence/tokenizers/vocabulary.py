"""The size of the byte tokenizer's vocabulary. Separate, so that configs can import it without torch."""

BYTES = 257
"""The vocabulary size of the byte tokenizer: 256 bytes and the end-of-document token."""
