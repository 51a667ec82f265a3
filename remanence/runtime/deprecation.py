"""Old names of functions and methods: they keep working, with one `DeprecationWarning` for each place of use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed_names(module: dict[str, Any], names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` (its ``globals()`` are `module`) that finds old names under the new ones."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        warnings.warn(
            f"{module['__name__']}.{name} is deprecated: use {names[name]}", DeprecationWarning, stacklevel=2
        )
        return module[names[name]]

    return find


def renamed_attribute(old: str, new: str) -> property:
    """An attribute under its old name, to read and to set."""

    def warn(instance: object) -> None:
        warnings.warn(
            f"{type(instance).__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3
        )

    def get(instance: object) -> object:
        warn(instance)
        return getattr(instance, new)

    def set_(instance: object, value: object) -> None:
        warn(instance)
        setattr(instance, new, value)

    return property(get, set_, doc=f"The old name of `{new}`.")


def renamed_overrides(cls: type, names: Mapping[str, str]) -> None:
    """Let what a subclass defines under old names count under the new ones."""
    for old, new in names.items():
        if old in cls.__dict__:
            warnings.warn(f"{cls.__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)
            setattr(cls, new, cls.__dict__[old])


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """A method under its old name."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(self, new)(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"The old name of `{new}`."
    return call
