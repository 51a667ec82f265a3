"""The architectures, one file each: attention, the neural memory alone, Titans' three ways to have both, and the kNN
memory.

`MIXERS` names them; a model's `pattern` is made of these names. To add your own, write a `Mixer` and register it:
``MIXERS["mine"] = Mine``, anything that makes one from a `ModelConfig`.
"""

from collections.abc import Callable
from functools import partial

from remanence.config import ModelConfig
from remanence.mixers.attention import AttentionMixer
from remanence.mixers.base import Context, MemoryTrace, Mixer, MixerDecoder, MixerOutput, Shared, Text
from remanence.mixers.conv_window import ConvWindow, ConvWindowState
from remanence.mixers.knn import Knn, KnnState
from remanence.mixers.lmm import LMM, MATRIX, ttt
from remanence.mixers.mac import MAC, MACState
from remanence.mixers.mag import MAG
from remanence.mixers.mal import MAL
from remanence.mixers.window_and_memory import WindowAndMemoryState

MIXERS: dict[str, Callable[[ModelConfig], Mixer]] = {
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "lmm": LMM,
    "attention": partial(AttentionMixer, sliding=False),
    "window": partial(AttentionMixer, sliding=True),
    "conv_window": ConvWindow,
    "knn": Knn,
    "linear_attention": partial(LMM, rule="linear_attention", **MATRIX),
    "delta": partial(LMM, rule="delta", **MATRIX),
    "gated_delta": partial(LMM, rule="gated_delta", **MATRIX),
    "ttt": ttt,
}

BLOCKS = MIXERS
"""The old name of `MIXERS`."""

__all__ = [
    "BLOCKS",
    "LMM",
    "MAC",
    "MAG",
    "MAL",
    "MIXERS",
    "AttentionMixer",
    "Context",
    "ConvWindow",
    "ConvWindowState",
    "Knn",
    "KnnState",
    "MACState",
    "MemoryTrace",
    "Mixer",
    "MixerDecoder",
    "MixerOutput",
    "Shared",
    "Text",
    "WindowAndMemoryState",
]
