"""Packages that add a field of application, such as `remanence.forecast`, and what they register. Imports no torch.

A vertical is a folder of this package with a module `vertical`, which defines ``VERTICAL = Vertical(...)``. The rest
of the package finds kinds of data, evaluations, recipes, model types, tokenizers and file formats through the functions
here and never imports a vertical by name: without its folder, everything else works.
"""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import cleandoc
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from remanence.io.files import read_json

PACKAGE = __name__.rpartition(".")[0]

Name = str
"""``"module:attribute"``, imported when it is needed."""
Value = TypeVar("Value")
Class = TypeVar("Class", bound=type)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format of documents: its name, the suffixes of its files, and the function from a path to documents."""

    name: str
    suffixes: tuple[str, ...]
    documents: Name


@dataclass(frozen=True, kw_only=True)
class Vertical:
    """What a vertical registers.

    Attributes:
        name: of its recipes' folder: ``forecast/etth1``.
        data_configs: the dataclasses of its kinds of training data, by kind (``data.kind``).
        sources: the functions that make their sources of batches, entries of `remanence.train.SOURCES`.
        tasks: the classes of `remanence.train.TrainTask` of kinds that are not language modelling.
        train_fields: a dataclass whose fields are added to `TrainConfig`.
        evaluations: its tasks of ``remanence eval`` by name.
        models: functions ``(folder, device=)`` that load a model, by the ``model_type`` in its config.json.
        tokenizers: functions from the content of a tokenizer.json to a tokenizer, or None if it is another one.
        formats: its file formats.
        moved: modules and attributes by the name that they had in earlier versions; "" for a package of such modules.
    """

    name: str
    data_configs: Mapping[str, Name] = field(default_factory=dict)
    sources: Mapping[str, Name] = field(default_factory=dict)
    tasks: Mapping[str, Name] = field(default_factory=dict)
    train_fields: Name | None = None
    evaluations: Mapping[str, Name] = field(default_factory=dict)
    models: Mapping[str, Name] = field(default_factory=dict)
    tokenizers: tuple[Name, ...] = ()
    formats: tuple[Format, ...] = ()
    moved: Mapping[str, Name] = field(default_factory=dict)


@cache
def verticals() -> tuple[Vertical, ...]:
    """The verticals that are installed."""
    found = sorted(Path(__file__).parent.glob("*/vertical.py"))
    return tuple(import_module(f"{PACKAGE}.{path.parent.name}.vertical").VERTICAL for path in found)


def imported(name: Name) -> Any:
    """The attribute or module that a name refers to."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


class Registry(UserDict[str, Value]):
    """Objects by name. An entry given as "module:attribute" is imported when it is asked for."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)

    def __getitem__(self, name: str) -> Value:
        value = super().__getitem__(name)
        if isinstance(value, str):
            value = self.data[name] = imported(value)
        return value


def data_configs() -> dict[str, Name]:
    return {kind: name for each in verticals() for kind, name in each.data_configs.items()}


def sources() -> dict[str, Name]:
    return {kind: name for each in verticals() for kind, name in each.sources.items()}


def train_tasks() -> dict[str, Name]:
    return {kind: name for each in verticals() for kind, name in each.tasks.items()}


def evaluations() -> dict[str, Name]:
    return {name: task for each in verticals() for name, task in each.evaluations.items()}


def recipes() -> dict[str, Path]:
    """The file of every recipe by its name."""
    home = Path(__file__).parent
    found = [
        (each.name, path) for each in verticals() for path in (home / each.name / "recipes").glob("*.py")
    ]
    return {f"{name}/{path.stem}": path for name, path in sorted(found) if path.stem != "__init__"}


def formats() -> tuple[Format, ...]:
    return tuple(found for each in verticals() for found in each.formats)


def model_loader(folder: Path) -> Callable[..., Any] | None:
    """The function that loads a vertical's model from its folder; None for any other folder."""
    path = folder / "config.json"
    model_type = read_json(path).get("model_type") if path.is_file() else None
    models = {name: loader for each in verticals() for name, loader in each.models.items()}
    return imported(models[model_type]) if isinstance(model_type, str) and model_type in models else None


def tokenizer_of(content: Mapping[str, Any]) -> Any:
    """A vertical's tokenizer that a tokenizer.json describes, or None."""
    read = (imported(name)(content) for each in verticals() for name in each.tokenizers)
    return next((found for found in read if found is not None), None)


def with_vertical_fields(cls: Class) -> Class:
    """A class decorator for `TrainConfig`, applied before `dataclass`: adds the fields that verticals have."""
    for vertical in verticals():
        if vertical.train_fields is None:
            continue
        added = imported(vertical.train_fields)
        cls.__annotations__.update(get_type_hints(added))
        for each in fields(added):
            made = each.default_factory is not MISSING
            default = {"default_factory": each.default_factory} if made else {"default": each.default}
            setattr(cls, each.name, field(**default))
        _, _, listed = cleandoc(added.__doc__ or "").partition("Attributes:\n")
        cls.__doc__ = f"{cleandoc(cls.__doc__ or '').rstrip()}\n{indent(cleandoc(listed), '    ')}\n"
    return cls


def moved_attribute(module: str, name: str) -> Any:
    """For a module's ``__getattr__``: what a vertical has taken over from it, with a warning."""
    old = f"{module}:{name}"
    for vertical in verticals():
        if old in vertical.moved:
            _warn(old, vertical.moved[old], 4)
            found = imported(vertical.moved[old])
            setattr(sys.modules[module], name, found)
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _warn(old: str, new: str, level: int) -> None:
    names = (each.replace(":", ".") for each in (old, new))
    warnings.warn("{} is deprecated: use {}".format(*names), DeprecationWarning, stacklevel=level)


class _Moved(MetaPathFinder, Loader):
    """Finds modules of earlier versions by their old names. Asked last, when there is no such file."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        moved: dict[str, str] = {old: new for each in verticals() for old, new in each.moved.items()}
        if name not in moved:
            return None
        return ModuleSpec(name, self, loader_state=moved[name], is_package=not moved[name])

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if not spec.loader_state:
            return None
        _warn(spec.name, spec.loader_state, 3)
        found = import_module(spec.loader_state)
        spec.loader_state = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # The import system has given a moved module the specification of its old name.
        module.__spec__ = module.__spec__.loader_state or module.__spec__


def find_moved_modules() -> None:
    """Have imports of modules by their old names work."""
    if not any(isinstance(each, _Moved) for each in sys.meta_path):
        sys.meta_path.append(_Moved())
