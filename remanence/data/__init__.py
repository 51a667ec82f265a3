"""Texts to tokens on disk, and tokens to batches. Documents stay apart, and any step's batch can be made again."""

from remanence.data.batches import Batch, Documents, Packed
from remanence.data.prepare import prepare
from remanence.data.shards import Tokens

__all__ = ["Batch", "Documents", "Packed", "Tokens", "prepare"]
