"""Checks before a run writes to its folder, and how the folder is emptied if the run cannot start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remanence.io.files import remove_leftovers
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer
from remanence.train.distributed import World

PROBE = "It was 1851, and the whale - précisément - 10,000 miles away; \t'Nobody' knew."
"""A text on which two tokenizers that differ will probably differ."""


@contextmanager
def emptied_on_failure(out: Path, world: World) -> Iterator[None]:
    """A run that could not begin leaves nothing in its folder: it can be tried again. Once it has, all stays."""
    try:
        yield
    except BaseException:
        if world.first and not (out / "metrics.jsonl").exists():
            for path in out.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def check_free(out: Path) -> None:
    if out.is_dir():
        remove_leftovers(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"out: expected a new or empty folder, got {out}; --resume goes on with a run that is there"
        )


def check_tokenizer(init_from: str | None, tokenizer: Tokenizer | None) -> None:
    """A model that is trained further must be given the tokens it knows."""
    if init_from is None or tokenizer is None or not (Path(init_from) / "tokenizer.json").is_file():
        return  # a new model, or trained on made-up symbols
    own = load_tokenizer(init_from)
    if own.vocabulary != tokenizer.vocabulary or _probed(own) != _probed(tokenizer):
        hint = "prepare it with that tokenizer"
        raise ValueError(f"init_from: expected data with the tokens of {init_from}, got other ones; {hint}")


def _probed(tokenizer: Tokenizer) -> object:
    """The probe's tokens, or why a tokenizer refuses it: one of bases has no token for a whale."""
    try:
        return tokenizer.encode(PROBE)
    except ValueError as error:
        return str(error)
