"""A web page that shows how a model's memories process a text: `record` reads the text and records the
memories, and `Page` writes the recordings to one HTML file.
"""

from remanence.lens.page import Page, estimate_page_bytes, unpack
from remanence.lens.recording import (
    REACH,
    SIGNALS,
    Recording,
    memory_layers,
    nearest_values,
    piece_length,
    record,
    weight_norms,
)

__all__ = [
    "REACH",
    "SIGNALS",
    "Page",
    "Recording",
    "estimate_page_bytes",
    "memory_layers",
    "nearest_values",
    "piece_length",
    "record",
    "unpack",
    "weight_norms",
]
