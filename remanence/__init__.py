"""remanence: sequence models that keep learning after training ends."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remanence.verticals import find_moved_modules

__version__ = "0.2.0"

find_moved_modules()

# Names are imported when they are first used, so that the command line can respond before torch is loaded.
_HOMES = {
    "attach": "remanence.hf",
    "detach": "remanence.hf",
    "AttachConfig": "remanence.attached.config",
    "Model": "remanence.model",
    "CausalModel": "remanence.model",
    "Backbone": "remanence.backbone",
    "Mixer": "remanence.mixers",
    "MIXERS": "remanence.mixers",
    "State": "remanence.model",
    "Session": "remanence.inference.session",
    "Sampling": "remanence.inference.generate",
    "Generation": "remanence.inference.generate",
    "ModelConfig": "remanence.config",
    "MemoryConfig": "remanence.config",
    "preset": "remanence.config",
    "NeuralMemory": "remanence.memory.neural",
    "NeuralMemoryState": "remanence.memory.neural",
    "memorize": "remanence.ops",
    "recall": "remanence.ops",
    "start": "remanence.ops",
    "Gates": "remanence.ops",
    "MemoryState": "remanence.ops",
    "MLP": "remanence.ops",
    "Net": "remanence.ops",
    "Rule": "remanence.ops",
    "NETS": "remanence.ops",
    "RULES": "remanence.ops",
}
"""The module of each public name."""

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from remanence.attached.config import AttachConfig as AttachConfig
    from remanence.backbone import Backbone as Backbone
    from remanence.config import MemoryConfig as MemoryConfig
    from remanence.config import ModelConfig as ModelConfig
    from remanence.config import preset as preset
    from remanence.hf import attach as attach
    from remanence.hf import detach as detach
    from remanence.inference.generate import Generation as Generation
    from remanence.inference.sampling import Sampling as Sampling
    from remanence.inference.session import Session as Session
    from remanence.memory.neural import NeuralMemory as NeuralMemory
    from remanence.memory.neural import NeuralMemoryState as NeuralMemoryState
    from remanence.mixers import MIXERS as MIXERS
    from remanence.mixers import Mixer as Mixer
    from remanence.model import CausalModel as CausalModel
    from remanence.model import Model as Model
    from remanence.model import State as State
    from remanence.ops import MLP as MLP
    from remanence.ops import NETS as NETS
    from remanence.ops import RULES as RULES
    from remanence.ops import Gates as Gates
    from remanence.ops import MemoryState as MemoryState
    from remanence.ops import Net as Net
    from remanence.ops import Rule as Rule
    from remanence.ops import memorize as memorize
    from remanence.ops import recall as recall
    from remanence.ops import start as start


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'remanence' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
