"""The mixers, one file each: attention, the neural memory alone, Titans' MAC, MAG and MAL, and the kNN memory.

A mixer is the part of a layer that exchanges information between tokens. `MIXERS` maps names to mixers; the
`pattern` of a model is a sequence of these names. To add a mixer, write a subclass of `Mixer` and register
it, or any function that creates one from a `ModelConfig`: ``MIXERS["mine"] = Mine``.
"""

from collections.abc import Callable
from functools import partial

from remanence.config import ModelConfig
from remanence.mixers.attention import AttentionMixer
from remanence.mixers.base import Context, MemoryTrace, Mixer, MixerDecoder, MixerOutput, SharedValues, Text
from remanence.mixers.conv_window import ConvWindow, ConvWindowState
from remanence.mixers.knn import Knn, KnnState
from remanence.mixers.lmm import LMM, linear_baseline, ttt
from remanence.mixers.mac import MAC, MACState
from remanence.mixers.mag import MAG
from remanence.mixers.mal import MAL
from remanence.mixers.window_and_memory import WindowAndMemoryState
from remanence.runtime.deprecation import renamed_names

MIXERS: dict[str, Callable[[ModelConfig], Mixer]] = {
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "lmm": LMM,
    "attention": partial(AttentionMixer, sliding=False),
    "window": partial(AttentionMixer, sliding=True),
    "conv_window": ConvWindow,
    "knn": Knn,
    "linear_attention": linear_baseline("linear_attention"),
    "delta": linear_baseline("delta"),
    "gated_delta": linear_baseline("gated_delta"),
    "ttt": ttt,
}
"""For each name in a `pattern`, a function that creates the mixer from the configuration of the model."""

BLOCKS = MIXERS
"""The old name of `MIXERS`."""

__getattr__ = renamed_names(globals(), {"Shared": "SharedValues"})

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
    "SharedValues",
    "Text",
    "WindowAndMemoryState",
]
