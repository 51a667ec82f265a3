"""Command check: the laws of a PyTorch module of one's own."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from remanence.cli.arguments import Device
from remanence.runtime.choices import check_choice
from remanence.runtime.terminal import echo_json

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Check:
    """Test whether a PyTorch module is causal, streams, keeps rows apart, and so on, and print a table.

    The module has forward(x) -> y, or forward(x, state=None) -> (y, state) with None at a document's start; x and y are
    [rows, tokens, ...]. If yours is called in another way, name a class of a few lines that wraps it. The file is
    executed.

    The exit code is 1 if a law is broken. Contraction (the difference between two states never grows) is reported, but
    only counts if it is named with --laws, because good modules may lack it.
    """

    module: tyro.conf.Positional[str]
    """Where the class is: FILE:Class, FILE being a Python file, or package.module:Class. A function that returns a
    module works, too.
    """
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """Arguments of the class: dim=16 heads=2 ..."""
    dim: int | None = None
    """Width of the input. Default: the argument dim, or 16."""
    vocabulary: int | None = None
    """Token ids below this number as the input, instead of vectors of width dim."""
    tokens: int = 96
    """Length of the input; more than the module's chunks."""
    rows: int = 3
    """Rows of the batch."""
    state: str = "state"
    """Name of forward's parameter for the state."""
    laws: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAW")] = ()
    """Which laws: causality, split, rows, determinism, round-trip, gradients, reference, contraction. Default: all."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Dtype of parameters and input. In float64, a difference cannot be explained by rounding."""
    device: Device = "cpu"
    """Device of the module and its input."""
    seed: int = 0
    """Random seed of the weights and the input."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        import torch

        from remanence.laws import LAWS, OPTIONAL, check
        from remanence.runtime.device import resolve

        for name, least in (("tokens", 4), ("rows", 2), ("dim", 1), ("vocabulary", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name}: expected at least {least}, got {value}")
        names = {law.replace(" ", "-"): law for law in LAWS}
        for law in self.laws:
            check_choice("--laws", law, names)
        torch.manual_seed(self.seed)
        arguments = dict(map(_parse_argument, self.arguments))
        dtype, device = getattr(torch, self.dtype), resolve(self.device)
        module = self._build(_load(self.module), arguments).to(device, dtype)
        width = self.dim or arguments.get("dim", 16)

        def draw(tokens: int) -> torch.Tensor:
            if self.vocabulary is not None:
                return torch.randint(self.vocabulary, (self.rows, tokens), device=device)
            return torch.randn(self.rows, tokens, width, dtype=dtype, device=device)

        wanted = [names[law] for law in self.laws] or None
        findings = check(module, draw, tokens=self.tokens, state=self.state, laws=wanted)
        if self.json:
            echo_json([finding._asdict() for finding in findings])
        else:
            self._show(findings)
        broken = [each.law for each in findings if each.holds is False]
        if any(law not in OPTIONAL or wanted is not None for law in broken):
            sys.exit(1)

    def _build(self, factory: Callable[..., Any], arguments: dict[str, Any]) -> nn.Module:
        """Call the class or function with the given arguments."""
        from torch import nn

        try:
            module = factory(**arguments)
        except Exception as error:  # whatever the class raises
            text = " ".join(str(error).split())
            raise ValueError(f"{self.module}: could not be made: {type(error).__name__}: {text}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{self.module}: expected a torch.nn.Module, got {type(module).__name__}")
        return module

    def _show(self, findings: list[Any]) -> None:
        """Print the table."""
        from rich.table import Table

        from remanence.cli.console import Console, coloured

        shape = "token ids" if self.vocabulary is not None else self.dtype
        table = Table(
            title=f"{self.module}, {self.rows} x {self.tokens} tokens, {shape}", title_justify="left"
        )
        table.add_column("law", no_wrap=True)
        table.add_column("holds", no_wrap=True)
        table.add_column("detail", overflow="fold")
        words = {True: ("yes", "green"), False: ("no", "red"), None: ("-", "dim")}
        for finding in findings:
            table.add_row(finding.law, coloured(*words[finding.holds]), finding.detail)
        Console().print(table)


def _parse_argument(text: str) -> tuple[str, Any]:
    """Split name=value. The value is a Python literal, or else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"arguments: expected name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _load(target: str) -> Callable[..., Any]:
    """Return the class or function that ``FILE:Class`` or ``package.module:Class`` names."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"module: expected module.py:Class or package.module:Class, got {target!r}")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"module: expected a file, got {place!r}, which does not exist")
        place, found = path.stem, Path(getattr(sys.modules.get(path.stem), "__file__", None) or path)
        if not found.exists() or not found.samefile(path):
            raise ValueError(f"module: {path.name} has the name of an imported module; rename the file")
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        loaded = importlib.import_module(place)
    except Exception as error:  # whatever the file raises
        text = " ".join(str(error).split())
        raise ValueError(f"module: {place} could not be imported: {type(error).__name__}: {text}") from error
    if not callable(getattr(loaded, name, None)):
        classes = [key for key, value in vars(loaded).items() if inspect.isclass(value)]
        check_choice("module", name, classes)
    return getattr(loaded, name)
