"""Deprecated names of functions and methods. They keep working and issue a `DeprecationWarning`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed_names(module: dict[str, Any], names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that resolves old names to new ones with a warning. `module` is
    the module's ``globals()``, and `names` maps old to new names.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        warnings.warn(
            f"{module['__name__']}.{name} is deprecated: use {names[name]}", DeprecationWarning, stacklevel=2
        )
        return module[names[name]]

    return find


def renamed_attribute(old: str, new: str) -> property:
    """Return a property that reads and sets the attribute `new` and warns that `old` is deprecated."""

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
    """Let methods and attributes that a subclass defines under old names override those with the new names.
    `names` maps old to new names.
    """
    for old, new in names.items():
        if old in cls.__dict__:
            warnings.warn(f"{cls.__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)
            setattr(cls, new, cls.__dict__[old])


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """Return a method that calls the method `new` and warns that `old` is deprecated."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(self, new)(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"The old name of `{new}`."
    return call
