"""Tokenized corpora on disk, and batches from them. State never crosses documents; batches are reproducible by step."""

from remanence.data.batches import Batch, Documents, Packed
from remanence.data.prepare import prepare
from remanence.data.shards import Tokens

__all__ = ["Batch", "Documents", "Packed", "Tokens", "prepare"]
