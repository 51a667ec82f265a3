"""The defaults with which text is generated: those of `Session.generate`, `remanence generate` and `remanence chat`."""

MAX_TOKENS = 128
TEMPERATURE = 0.7
"""The most likely token every time (0) makes small models repeat themselves; facts are recalled alike at both."""
PHRASE_BYTES, PHRASE_TOKENS = 16, 6
"""The length of a phrase, about three words, that an answer does not repeat: in bytes, in tokens of other tokenizers.
"""
