"""Commands about models: new, inspect, presets, info."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from remanence.cli.arguments import Device, Folder, errors_name_option
from remanence.io.shipped import resolve_model_path
from remanence.runtime.choices import did_you_mean
from remanence.runtime.terminal import echo, echo_json

if TYPE_CHECKING:
    from torch import Tensor

    from remanence.config import ModelConfig

VOCABULARY = 32_000
"""Vocabulary size for which `remanence presets` lists the number of parameters."""


@dataclass(frozen=True)
class New:
    """Create an untrained model: a folder with configuration, weights and tokenizer.

    --model.field=value changes a field of the preset's configuration. The fields and their defaults are listed below.
    """

    OPTIONS: ClassVar = ("variant", "match", "no-match", "seed", "tokenizer", "help")
    OVERRIDES_OF: ClassVar = "the model, such as --model.memory.rule=titans"

    preset: tyro.conf.Positional[str]
    """Size: tiny, small, 170m, 340m, 760m or 1.3b."""
    out: Folder
    """Folder to create."""
    variant: str = "mac"
    """Layer type, or several joined by + that repeat from layer to layer: mac, mag, mal, lmm, attention,
    lmm+window, ...; or memorizing: sliding-window attention, and one kNN layer three quarters of the way up.
    """
    match: bool = False
    """Reduce the feed-forward width until the model has as many parameters as the Transformer of its preset."""
    seed: int = 0
    """Random seed of the initial weights."""
    tokenizer: Path | None = None
    """A tokenizer.json, .tiktoken or SentencePiece .model, or a model's name on Hugging Face's hub (extra `hf`).
    Default: bytes.
    """
    overrides: tyro.conf.Suppress[tuple[tuple[str, str], ...]] = ()

    @staticmethod
    def list_fields() -> Iterator[str]:
        """The lines of --help that list the fields of the model."""
        from remanence.cli.fields import all_fields, format_fields
        from remanence.train import TrainConfig

        yield "model fields:"
        fields = (each for each in all_fields(TrainConfig()) if each.name.startswith("model."))
        yield from format_fields(each for each in fields if each.name != "model.vocab_size")

    def _changed(self, config: ModelConfig) -> ModelConfig:
        """Return the preset's configuration with the given overrides applied."""
        from remanence.train.config import TrainConfig, override

        for name, _ in self.overrides:
            if not name.startswith("model."):
                hint = did_you_mean(f"--{name}", [f"--{each}" for each in self.OPTIONS])
                raise ValueError(f"--{name}: expected an option, or a field of {self.OVERRIDES_OF}{hint}")
            if name == "model.vocab_size":
                raise ValueError(f"--{name}: expected the tokenizer's (--tokenizer), got another")
        return override(TrainConfig(model=config), dict(self.overrides)).model if self.overrides else config

    def run(self) -> None:
        import torch

        from remanence.config import preset
        from remanence.model import Model, matched
        from remanence.tokenizers.tokens import ByteTokenizer, read_tokenizer, tokenizer_file

        out = self.out
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            hint = "existing files are not overwritten"
            raise ValueError(f"out: expected a new or empty folder, got {out}, which is not; {hint}")
        own = None if self.tokenizer is None else read_tokenizer(tokenizer_file(self.tokenizer))
        tokenizer = own or ByteTokenizer()
        torch.manual_seed(self.seed)
        with errors_name_option("pattern", "--variant"):
            config = self._changed(preset(self.preset, self.variant, vocab_size=tokenizer.vocabulary))
            model = Model(matched(config) if self.match else config)
        is_new = not out.exists()
        try:
            model.save(out)
            tokenizer.save(out)
        except OSError:
            if is_new:
                shutil.rmtree(out, ignore_errors=True)
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        facts = f"{count:,} parameters, untrained, vocabulary {config.vocab_size}"
        echo(f"{out}: {self.preset} {self.variant}, {facts}")


@dataclass(frozen=True)
class Inspect:
    """Print the contents of a memory file or a model folder."""

    file: Folder
    """Memory file or model folder."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        inspect(self.file, self.json)


@dataclass(frozen=True)
class Presets:
    """List presets and variants with their parameters and the size of their states."""

    json: bool = False
    """Print JSON."""
    match: bool = False
    """Reduce the feed-forward width until every variant has as many parameters as the Transformer."""

    def run(self) -> None:
        print_presets(self.json, self.match)


@dataclass(frozen=True)
class Info:
    """Print versions, device and operator backends, for bug reports."""

    device: Device = "auto"
    """Device to check."""

    def run(self) -> None:
        import platform

        import torch

        import remanence
        from remanence.ops import BACKENDS
        from remanence.runtime.device import resolve

        python = f"Python {platform.python_version()}, {platform.platform()}"
        echo(f"remanence {remanence.__version__}, torch {torch.__version__}, {python}")
        echo(f"device {resolve(self.device)}, operator backends: {', '.join(BACKENDS)}")


def inspect(path: Path, as_json: bool) -> None:
    """Print the contents of a memory file or a model folder."""
    from rich.table import Table

    from remanence.cli.console import Console

    path = resolve_model_path(path)
    facts = _model_facts(path) if path.is_dir() else _memory_facts(path)
    if as_json:
        echo_json(facts)
        return
    console = Console()
    layers, stores = facts.pop("layers", []), facts.pop("stores", [])
    table = Table(title=str(path), show_header=False)
    for name, value in facts.items():
        table.add_row(name, _text(value))
    console.print(table)
    if layers:
        table = Table("memory", "tokens written", "weights' norm", "momentum's norm", title="neural memories")
        for layer in layers:
            momentum = f"{layer['momentum_norm']:.4g}" if layer["momentum_norm"] is not None else "none"
            weights = f"{layer['weight_norm']:.4g}"
            table.add_row(layer["name"], f"{layer['tokens']}", weights, momentum)
        console.print(table)
    if stores:
        table = Table("store", "entries", "of", "ever written", title="kNN stores")
        for store in stores:
            counts = f"{store['entries']}", f"{store['size']:,}", f"{store['written']}"
            table.add_row(store["name"], *counts)
        console.print(table)


def _text(value: Any) -> str:
    """Return a value as text for a table."""
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else json.dumps(value)


def _model_facts(folder: Path) -> dict[str, Any]:
    """Return the properties of the model in a folder, as `inspect` prints them."""
    from remanence.attached.folder import load_model
    from remanence.inference import memfile

    model = load_model(folder)
    config = model.config
    return {
        "kind": "model",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": " ".join(config.blocks),
        "state_bytes": model.start(1).nbytes,
        "fingerprint": memfile.fingerprint(model)._asdict(),
        "config": config.to_dict(),
    }


def _memory_facts(path: Path) -> dict[str, Any]:
    """Return the properties of a memory file, as `inspect` prints them. All checksums are verified."""
    from remanence.inference import memfile

    header, tensors = memfile.read_file(path, verify=True)
    return {
        "kind": "memory",
        "schema": header["schema"],
        "tokens": header["tokens"],
        "bytes": path.stat().st_size,
        "fingerprint": dict(zip(memfile.Fingerprint._fields, header["fingerprint"], strict=True)),
        "config": header["config"],
        "layers": _layer_facts(path, tensors),
        "stores": _store_facts(path, tensors),
    }


def _layer_facts(path: Path, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return, for each neural memory in a file, the number of tokens written and the norms of its weights and
    momentum (None without momentum).
    """
    facts = []
    for name in tensors:
        if not name.endswith(".layers.0"):
            continue
        stem = name.removesuffix("layers.0")
        parts = [tensor.double() for key, tensor in tensors.items() if key.startswith(f"{stem}layers.")]
        if f"{stem}position" not in tensors or any(part.dim() < 4 for part in parts):
            expected = "expected a memory's weights and position"
            raise ValueError(f"{path}: {stem.rstrip('.')}: {expected}, got something else")
        slots = range(parts[0].shape[2])  # weights, and momentum if the rule has it
        norms = [sum(float(part[:, :, slot].square().sum()) for part in parts) ** 0.5 for slot in slots]
        facts.append(
            {
                "name": stem.rstrip("."),
                "tokens": tensors[f"{stem}position"].tolist(),
                "weight_norm": norms[0],
                "momentum_norm": norms[1] if len(norms) > 1 else None,
            }
        )
    return facts


def _store_facts(path: Path, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return, for each kNN store in a file, the number of entries, the capacity, and the number of entries
    ever written.
    """
    facts = []
    for name in tensors:
        if not name.endswith(".store.written"):
            continue
        stem = name.removesuffix(".written")
        position = tensors.get(f"{stem}.position")
        if position is None or position.dim() != 2:
            expected = "expected a store's entries and their positions"
            raise ValueError(f"{path}: {stem}: {expected}, got something else")
        entries, written = (position >= 0).sum(1).tolist(), tensors[name].tolist()
        facts.append({"name": stem, "entries": entries, "size": position.shape[1], "written": written})
    return facts


def print_presets(as_json: bool, match: bool) -> None:
    """Print every preset and variant with its number of parameters at a vocabulary of 32,000 and the size of
    one sequence's state. With `match`, feed-forward widths are reduced as by `matched`.
    """
    from rich.table import Table

    from remanence.cli.console import Console
    from remanence.config import PRESETS, preset
    from remanence.mixers import BLOCKS
    from remanence.model import matched

    rows = []
    for name in PRESETS:
        for variant in BLOCKS:
            config = preset(name, variant, vocab_size=VOCABULARY)
            config = matched(config) if match else config
            rows.append({"preset": name, "variant": variant, "ffn": config.hidden, **_sizes(config)})
    if as_json:
        echo_json(rows)
        return
    sizes = f"parameters at a vocabulary of {VOCABULARY:,}"
    table = Table(title=f"{sizes}; the state of one sequence (bfloat16 model)")
    for column in ("preset", "variant", "parameters", "feed-forward", "state", "= tokens of bf16 KV cache"):
        table.add_column(column, justify="left" if column in ("preset", "variant") else "right")
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        size = f"{row['parameters'] / 1e6:,.1f} M", f"{row['ffn']:,}"
        state = "grows", "as it reads"
        if row["state_bytes"] is not None:
            state = f"{row['state_bytes'] / 2**20:,.2f} MiB", f"{row['kv_tokens']:,}"
        last = following["preset"] != row["preset"]
        table.add_row(row["preset"], row["variant"], *size, *state, end_section=last)
    Console().print(table)


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the number of parameters, the bytes of a state in a bfloat16 model, and the number of tokens for
    which a Transformer's bf16 KV cache is as large. The last two are None if the state grows with the text.
    """
    import torch

    from remanence.model import Model

    with torch.device("meta"):
        model = Model(config).bfloat16()
        state = model.start(1)
    count = sum(parameter.numel() for parameter in model.parameters())
    if "attention" in config.blocks:
        return {"parameters": count, "state_bytes": None, "kv_tokens": None}
    per_token = 2 * 2 * config.dim * config.num_layers
    return {"parameters": count, "state_bytes": state.nbytes, "kv_tokens": round(state.nbytes / per_token)}
