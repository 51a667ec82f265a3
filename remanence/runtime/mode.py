"""The memory mode, and its deprecated name `memory` as an argument and as a model attribute. Imports no
torch.
"""

from __future__ import annotations

import warnings
from typing import Literal, Protocol, Self, overload

Mode = Literal["on", "off", "frozen", "fresh"]
MODES: tuple[Mode, ...] = ("on", "off", "frozen", "fresh")
"""What a model does with its memories. "on": read and write them. "off": run without them. "frozen": read
them only. "fresh": reset them at every segment.
"""


class HasMode(Protocol):
    """A model with a default memory mode."""

    memory_mode: Mode


def renamed_mode(memory: Mode, level: int = 3) -> Mode:
    """Return the value given as ``memory=`` and issue a deprecation warning. `level` is the warning's
    `stacklevel`.
    """
    warnings.warn("memory= is deprecated: use memory_mode=", DeprecationWarning, stacklevel=level)
    return memory


class RenamedMode:
    """Descriptor for ``model.memory``, the deprecated name of ``model.memory_mode``."""

    @overload
    def __get__(self, model: None, owner: type) -> Self: ...

    @overload
    def __get__(self, model: HasMode, owner: type) -> Mode: ...

    def __get__(self, model: HasMode | None, owner: type) -> Mode | Self:
        if model is None:
            return self
        warnings.warn(".memory is deprecated: use .memory_mode", DeprecationWarning, stacklevel=2)
        return model.memory_mode

    def __set__(self, model: HasMode, mode: Mode) -> None:
        warnings.warn(".memory is deprecated: use .memory_mode", DeprecationWarning, stacklevel=2)
        model.memory_mode = mode
