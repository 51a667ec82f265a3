"""Recipes: training configs that come with the package. Each is a file with a function `recipe`.

A recipe is found by its name or path. The recipes of a vertical start with its name, such as
``dna/pretrain``.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from remanence.runtime.choices import did_you_mean
from remanence.verticals import recipes

if TYPE_CHECKING:
    from remanence.train import TrainConfig

_own = {path.stem: path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"}
FILES = dict(sorted({**_own, **recipes()}.items()))
"""The file of each recipe by name."""
NAMES = tuple(FILES)
"""The names of all recipes of the package."""


def find_recipe(name: str | Path) -> Path:
    """Return the path of a recipe: an existing file, or the package's recipe (``recall``,
    ``recipes/recall.py``).
    """
    path = Path(name)
    if path.is_file():
        return path
    own = path.with_suffix("").as_posix().removeprefix("recipes/")
    if own in NAMES and path.suffix in ("", ".py"):
        return FILES[own]
    hint = did_you_mean(own, NAMES)
    raise ValueError(f"recipe: expected a Python file or one of {', '.join(NAMES)}, got {name}{hint}")


def load_recipe(name: str | Path) -> TrainConfig:
    """Run a recipe file and return its config. The file is executed: only load recipes that you trust."""
    from remanence.train import TrainConfig

    path = find_recipe(name)
    try:
        recipe = runpy.run_path(str(path)).get("recipe")
        if not callable(recipe):
            raise ValueError(f"{path}: expected a function recipe() that returns a TrainConfig, got none")
        config = recipe()
    except (SyntaxError, ImportError, TypeError, NameError, AttributeError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path}: expected recipe() to return a TrainConfig, got {type(config).__name__}")
    return config
