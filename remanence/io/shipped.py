"""Find the models that are included in the package, by name."""

from __future__ import annotations

from pathlib import Path

from remanence.runtime.deprecation import renamed_names

FOLDER = Path(__file__).parent.parent / "shipped"
"""The folder of the included models."""
CHAT_MODEL = "remanence-smollm2"
"""The name of the included model that `remanence chat` opens."""


def shipped_models() -> list[str]:
    """Return the names of the included models, as used in ``remanence read NAME book.txt --save book.mem``."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def resolve_model_path(model: str | Path) -> Path:
    """Return a model's folder: `model` itself if this path exists, else the folder of the included model with
    this name. If there is none, the path is returned unchanged.
    """
    path = Path(model)
    if not path.exists() and str(model) in shipped_models():
        return FOLDER / path
    return path


__getattr__ = renamed_names(globals(), {"located": "resolve_model_path"})
