"""Models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "shipped"


def shipped_models() -> list[str]:
    """Their names: ``remanence read NAME book.txt --save book.mem``."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def located(model: str | Path) -> Path:
    """A model's folder. A name that is no file or folder here may be that of a model that comes with the package."""
    path = Path(model)
    if not path.exists() and str(model) in shipped_models():
        return FOLDER / path
    return path
