"""Default settings for generating text with `Session.generate`, `remanence generate` and `remanence chat`."""

MAX_TOKENS = 128
"""The maximum number of tokens to generate."""
TEMPERATURE = 0.7
"""The sampling temperature. At 0 (always the most likely token) small models repeat themselves; facts are
recalled equally well at both values.
"""
PHRASE_BYTES, PHRASE_TOKENS = 16, 6
"""The length of a phrase that may not occur twice in an answer, about three words: in bytes for the byte
tokenizer, and in tokens for other tokenizers.
"""
