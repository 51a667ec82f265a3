"""Checks before a run writes to its folder, and the removal of its files if the run cannot start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remanence.io.files import remove_leftovers
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer
from remanence.train.distributed import ProcessGroup

PROBE = "It was 1851, and the whale - précisément - 10,000 miles away; \t'Nobody' knew."
"""A text for which two different tokenizers probably return different tokens."""


@contextmanager
def emptied_on_failure(out: Path, process_group: ProcessGroup) -> Iterator[None]:
    """Empty the folder if a run fails to start, so that it can be tried again.

    A run that has metrics is kept.
    """
    try:
        yield
    except BaseException:
        if process_group.is_first and not (out / "metrics.jsonl").exists():
            for path in out.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def check_free(out: Path) -> None:
    """Raise an error unless the folder of a new run is absent or empty. Temporary files are removed first."""
    if out.is_dir():
        remove_leftovers(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"out: expected a new or empty folder, got {out}; --resume goes on with a run that is there"
        )


def check_tokenizer(init_from: str | None, tokenizer: Tokenizer | None) -> None:
    """Raise an error if the data's tokenizer differs from that of the model that the run starts from."""
    if init_from is None or tokenizer is None or not (Path(init_from) / "tokenizer.json").is_file():
        return  # a new model, or a model or data without a tokenizer
    own = load_tokenizer(init_from)
    if own.vocabulary != tokenizer.vocabulary or _probed(own) != _probed(tokenizer):
        hint = "prepare it with that tokenizer"
        raise ValueError(f"init_from: expected data with the tokens of {init_from}, got other ones; {hint}")


def _probed(tokenizer: Tokenizer) -> object:
    """Return the tokens of the probe text, or the error message if the tokenizer cannot encode it."""
    try:
        return tokenizer.encode(PROBE)
    except ValueError as error:
        return str(error)
