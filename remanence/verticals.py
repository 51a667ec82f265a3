"""Registration of verticals: subpackages for one field of application, such as `remanence.forecast`. Imports no torch.

A vertical is a folder of this package with a module `vertical`, which defines ``VERTICAL = Vertical(...)``. The rest
of the package finds kinds of data, evaluations, recipes, model types, tokenizers and file formats through the functions
here and never imports a vertical by name. If the folder is removed, everything else still works.
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
"""Name of this package."""

Name = str
"""A reference ``"module:attribute"``, which is imported when it is needed."""
Value = TypeVar("Value")
Class = TypeVar("Class", bound=type)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format for documents: its name, its file suffixes, and the name of the function that reads
    documents from a path.
    """

    name: str
    suffixes: tuple[str, ...]
    documents: Name


@dataclass(frozen=True, kw_only=True)
class Vertical:
    """The components that a vertical adds to the package.

    Attributes:
        name: its folder in this package, and the prefix of its recipes, as in ``forecast/etth1``.
        data_configs: the dataclasses of its kinds of training data, by kind (``data.kind``).
        sources: the functions that make the sources of batches for these kinds, as in `remanence.train.SOURCES`.
        tasks: the subclasses of `remanence.train.TrainTask` for kinds of data that are not language modelling.
        train_fields: a dataclass whose fields are added to `TrainConfig`.
        evaluations: the tasks that it adds to ``remanence eval``, by name.
        models: functions ``(folder, device=)`` that load a model, by the ``model_type`` in its config.json.
        tokenizers: functions that take the content of a tokenizer.json and return a tokenizer, or None if it is not
            one of theirs.
        formats: the file formats that it adds.
        moved: the present names of modules and attributes, by their names in earlier versions; "" for a package that
            only contained such modules.
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
    """Return the verticals that are installed."""
    found = sorted(Path(__file__).parent.glob("*/vertical.py"))
    return tuple(import_module(f"{PACKAGE}.{path.parent.name}.vertical").VERTICAL for path in found)


def imported(name: Name) -> Any:
    """Import and return the attribute or module that a name refers to."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


class Registry(UserDict[str, Value]):
    """A dictionary of objects by name. An entry given as "module:attribute" is imported when it is first
    used.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)

    def __getitem__(self, name: str) -> Value:
        value = super().__getitem__(name)
        if isinstance(value, str):
            value = self.data[name] = imported(value)
        return value


def data_configs() -> dict[str, Name]:
    """Return the config dataclass of each kind of training data that verticals add, by kind."""
    return {kind: name for each in verticals() for kind, name in each.data_configs.items()}


def sources() -> dict[str, Name]:
    """Return the function that makes the source of batches for each kind of data that verticals add, by kind."""
    return {kind: name for each in verticals() for kind, name in each.sources.items()}


def train_tasks() -> dict[str, Name]:
    """Return the `TrainTask` class of each kind of data that verticals add, by kind."""
    return {kind: name for each in verticals() for kind, name in each.tasks.items()}


def evaluations() -> dict[str, Name]:
    """Return the evaluation tasks that verticals add, by task name."""
    return {name: task for each in verticals() for name, task in each.evaluations.items()}


def recipes() -> dict[str, Path]:
    """Return the file of every recipe of the verticals, by recipe name, such as "forecast/etth1"."""
    home = Path(__file__).parent
    found = [
        (each.name, path) for each in verticals() for path in (home / each.name / "recipes").glob("*.py")
    ]
    return {f"{name}/{path.stem}": path for name, path in sorted(found) if path.stem != "__init__"}


def formats() -> tuple[Format, ...]:
    """Return the file formats that verticals add."""
    return tuple(found for each in verticals() for found in each.formats)


def model_loader(folder: Path) -> Callable[..., Any] | None:
    """Return the function that loads a vertical's model from this folder, or None if the folder holds no such
    model.
    """
    path = folder / "config.json"
    model_type = read_json(path).get("model_type") if path.is_file() else None
    models = {name: loader for each in verticals() for name, loader in each.models.items()}
    return imported(models[model_type]) if isinstance(model_type, str) and model_type in models else None


def tokenizer_of(content: Mapping[str, Any]) -> Any:
    """Return the vertical's tokenizer that the content of a tokenizer.json describes, or None if no vertical
    recognises it.
    """
    read = (imported(name)(content) for each in verticals() for name in each.tokenizers)
    return next((found for found in read if found is not None), None)


def with_vertical_fields(cls: Class) -> Class:
    """Class decorator for `TrainConfig`, applied before `dataclass`. Adds the fields that verticals define,
    and their descriptions, to the class.
    """
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
    """Return an attribute that has moved from `module` to a vertical, with a deprecation warning. Used in the
    module's ``__getattr__``.
    """
    old = f"{module}:{name}"
    for vertical in verticals():
        if old in vertical.moved:
            _warn(old, vertical.moved[old], 4)
            found = imported(vertical.moved[old])
            setattr(sys.modules[module], name, found)
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _warn(old: str, new: str, level: int) -> None:
    """Issue a deprecation warning that an old name has been replaced by a new one. `level` is the stack level
    of the caller.
    """
    names = (each.replace(":", ".") for each in (old, new))
    warnings.warn("{} is deprecated: use {}".format(*names), DeprecationWarning, stacklevel=level)


class _Moved(MetaPathFinder, Loader):
    """Import hook that finds modules by the names they had in earlier versions. Python asks it last, when no
    file of that name exists.
    """

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
        # The import system has set the module's specification to that of the old name: restore the present one.
        module.__spec__ = module.__spec__.loader_state or module.__spec__


def find_moved_modules() -> None:
    """Install the import hook for modules that have moved to a vertical, so that their old names still work."""
    if not any(isinstance(each, _Moved) for each in sys.meta_path):
        sys.meta_path.append(_Moved())
