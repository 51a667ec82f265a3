"""Training runs that come with the package, each a file with a function `recipe`: found by name, or by path."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: one of the user's own, or the package's of that name (``recall``, ``recipes/recall.py``)."""
    path = Path(name)
    if path.is_file():
        return path
    if path.stem in NAMES and path.parent in (Path("."), Path("recipes")) and path.suffix in ("", ".py"):
        return FOLDER / f"{path.stem}.py"
    raise ValueError(f"recipe: expected a Python file or one of {', '.join(NAMES)}, got {name}")
