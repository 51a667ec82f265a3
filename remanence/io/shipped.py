"""Packaged models by name."""

from __future__ import annotations

from pathlib import Path

from remanence.runtime.deprecation import renamed_names

FOLDER = Path(__file__).parent.parent / "shipped"


def shipped_models() -> list[str]:
    """The names of packaged models: ``remanence read NAME book.txt --save book.mem``."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def resolve_model_path(model: str | Path) -> Path:
    """The folder of a model: the path itself or, if it does not exist, that of the packaged model of this name."""
    path = Path(model)
    if not path.exists() and str(model) in shipped_models():
        return FOLDER / path
    return path


__getattr__ = renamed_names(globals(), {"located": "resolve_model_path"})
