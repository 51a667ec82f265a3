"""Tokenized corpora on disk, and batches read from them. State never crosses documents, and any step's batch
can be reproduced.
"""

from remanence.data.batches import Batch, Documents, Packed
from remanence.data.prepare import prepare
from remanence.data.shards import Tokens

__all__ = ["Batch", "Documents", "Packed", "Tokens", "prepare"]
