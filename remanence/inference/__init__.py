"""Inference: reading of texts, sessions, text generation, fast decoding, and memory files."""

import remanence.inference.sentence_decoder  # noqa: F401, registers the decoders of pretrained models
