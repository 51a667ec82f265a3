"""What the command line does with models and memories. Imported only when a command runs, because it needs torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from remanence.config import PRESETS, Mode, ModelConfig, preset
from remanence.core.device import resolve
from remanence.core.files import called, replacing
from remanence.core.tokens import ByteTokenizer, load_tokenizer, read_tokenizer
from remanence.inference import memfile
from remanence.inference.generate import Generation, Sampling, Write
from remanence.inference.session import Session
from remanence.mixers import BLOCKS
from remanence.model import Model, matched

AUTOSAVE = float(os.environ.get("REMANENCE_AUTOSAVE", "60"))
"""Seconds between two saves while reading: what a kill can cost."""
VOCABULARY = 32_000


def open_session(folder: Path, device: str, memory: Path | None, mode: Mode, write: Write, force: bool) -> Session:
    place = resolve(device)
    model = Model.load(folder, device=place).eval()
    if mode != "on":
        model.memory = mode
    session = Session(model, load_tokenizer(folder), write=write)
    return session if memory is None else session.load(memory, force=force)


def new(name: str, out: Path, variant: str, match: bool, seed: int, tokenizer: Path | None) -> None:
    """An untrained model in a folder, to be trained or tried."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}, which is not; nothing is ever overwritten")
    own = ByteTokenizer() if tokenizer is None else read_tokenizer(tokenizer)
    config = preset(name, tuple(variant.split("+")), vocabulary=own.vocabulary)
    torch.manual_seed(seed)
    model = Model(matched(config) if match else config)
    made = not out.exists()
    try:
        model.save(out)
        own.save(out)
    except OSError:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        raise
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {name} {variant}, {count:,} parameters, untrained, vocabulary {config.vocabulary}")


def read(folder: Path, files: Sequence[Path], save: Path, memory: Path | None, resume: bool, force: bool, device: str) -> None:
    """Read files as one document into a memory, which is saved now and then, at the end, and when interrupted."""
    if not files:
        raise ValueError("files: expected at least one text to read, got none")
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
    check_target("--save", save, unless=save if resume else memory, hint="--resume reads on where it ended, --memory adds to it")
    continued = resume and save.exists()
    session = open_session(folder, device, save if continued else memory, "on", "all", force)
    source = Bytes(files)
    notes: dict[str, Any] = {"begun": session.tokens, "source": source.fingerprint()}
    if continued:
        notes = memfile.peek(save)[0]["notes"]
        if notes.get("source") != source.fingerprint() or type(notes.get("begun")) is not int:
            raise ValueError(f"--resume: expected the files that {save} was reading, got others")
    before, surprise, count, saved = session.tokens, 0.0, 0, time.monotonic()
    with Shown(source.size) as shown:
        try:
            for piece in session.reading(source, skip=before - notes["begun"]):
                surprise, count = surprise + piece.surprise, count + piece.surprised
                shown.update(source.passed, session.tokens - before, surprise / count if count else None)
                if time.monotonic() - saved > AUTOSAVE:
                    memfile.save(save, session.model, session.state, notes)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            memfile.save(save, session.model, session.state, notes)
            print(f"interrupted after {session.tokens:,} tokens, saved in {save}; --resume reads on", file=sys.stderr)
            raise
    memfile.save(save, session.model, session.state, notes)
    mean = f", mean surprise {surprise / count:.4f}" if count else ""
    print(f"{save}: {session.tokens - before:,} tokens read, {session.tokens:,} in all{mean}, {save.stat().st_size:,} bytes")


def check_target(what: str, path: Path, *, unless: Path | None, hint: str) -> None:
    """Before any work: that a memory can be written there, and that none is overwritten but the one in use."""
    if not path.parent.is_dir():
        raise ValueError(f"{what}: expected a folder that exists, got {path.parent}")
    if path.exists() and (unless is None or path.resolve() != unless.resolve()):
        raise ValueError(f"{what}: {path} exists; {hint}")


class Bytes:
    """The files' bytes as one stream, in pieces; how many have passed."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.passed = files, 0
        self.size = sum(path.stat().st_size for path in files)

    def fingerprint(self) -> str:
        """Of the files' sizes and beginnings: enough to see that a reading goes on with other ones."""
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as file:
                digest.update(f"{path.stat().st_size} ".encode() + file.read(1 << 16))
        return digest.hexdigest()[:32]

    def __iter__(self) -> Iterator[bytes]:
        for path in self.files:
            with open(path, "rb") as file:
                while piece := file.read(1 << 14):
                    self.passed += len(piece)
                    yield piece


class Shown:
    """Progress of reading: a bar on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.start, self.said = total, time.monotonic(), time.monotonic()
        self.console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %"), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        self.bar = Progress("reading", *columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("reading", total=total, note="")

    def __enter__(self) -> Shown:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, done: int, tokens: int, surprise: float | None) -> None:
        now = time.monotonic()
        note = f"{tokens:,} tokens, {tokens / max(now - self.start, 1e-9):,.0f}/s"
        note += f", surprise {surprise:.3f}" if surprise is not None else ""
        self.bar.update(self.task, completed=done, note=note)
        if not self.console.is_terminal and now - self.said > 10:
            self.said = now
            left = (now - self.start) * (self.total - done) / max(done, 1)
            print(f"reading {100 * done / max(self.total, 1):.0f} %, {note}, {left:.0f} s left", file=sys.stderr, flush=True)


def lens(folder: Path, text: Path, out: Path, memory: Path | None, layers: Sequence[int], reach: int, device: str) -> None:
    """A page of a text as the model's memories saw it, written while it is read."""
    from remanence.lens import Page, look, norms, stride, watched

    if not text.is_file():
        raise ValueError(f"--text: {text}: no such file")
    if out.resolve() == text.resolve():
        raise ValueError(f"--out: expected another file than --text, got {out}")
    session = open_session(folder, device, memory, "on", "all", False)
    model, before, source = session.model, session.tokens, Bytes([text])
    only = [number - 1 for number in layers]
    seen_layers = watched(model, only)
    several = len(set(model.config.pattern)) > 1
    names = [f"layer {index + 1}" + f" {model.config.blocks[index]}" * several for index in seen_layers]
    start = norms(seen_layers, session.state).tolist()
    with (
        replacing(out) as temporary,
        open(temporary, "w", encoding="utf-8", newline="\n") as file,
        Shown(source.size) as shown,
    ):
        page = Page(file, session.tokenizer, f"{text.name} as {called(folder)} saw it")
        for seen in look(session, source, stride(model, source.size), reach, only):
            page.add(seen)
            shown.update(source.passed, session.tokens - before, float(seen.signals[..., 0].mean()))
        if not page.ends:
            raise ValueError(f"--text: expected at least one token, got none in {text}")
        facts = [
            f"{text.name}, {session.tokens - before:,} tokens" + (f" after {before:,} in {memory.name}" if memory else ""),
            f"{called(folder)}: {' '.join(model.config.pattern)}, {len(names)} of {len(model.blocks)} layers shown",
            f"weights {memfile.fingerprint(model).weights[:12]}",
        ]
        page.finish(" · ".join(facts), names, start, reach, model.config.memory.conv)
    print(f"{out}: {session.tokens - before:,} tokens, {out.stat().st_size:,} bytes")


def generate(
    folder: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    memory: Path | None,
    save: Path | None,
    write: Write,
    mode: Mode,
    force: bool,
    device: str,
) -> None:
    """Print the answer to one prompt as it comes, or to several when all are done."""
    if not prompts or not all(prompts):
        raise ValueError("--prompt: expected a text of at least one character, got an empty one")
    if save is not None and len(prompts) > 1:
        raise ValueError(f"--save: expected a single prompt, as one memory can hold one course, got {len(prompts)}")
    if save is not None:
        check_target("--save", save, unless=memory, hint="a memory is only overwritten if it is the --memory in use")
    session = open_session(folder, device, memory, mode, write, force)
    generation = Generation(session.model, prompts, sampling, tokenizer=session.tokenizer, state=session.state, write=write)
    if len(prompts) == 1:
        for _, text in generation:
            print(text, end="", flush=True)
        print()
    else:
        for prompt, text in zip(prompts, generation.run().texts, strict=True):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
    if save is not None:
        memfile.save(save, session.model, generation.state)


def chat(folder: Path, sampling: Sampling, memory: Path | None, write: Write, force: bool, device: str) -> None:
    """Lines in, text out, until the input ends; with a memory file, everything is remembered in it after each answer."""
    if memory is not None:
        check_target("--memory", memory, unless=memory, hint="")
    existing = memory if memory is not None and memory.exists() else None
    session = open_session(folder, device, existing, "on", write, force)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{session.tokens:,} tokens remembered. An empty line is ignored; Ctrl-D ends.")
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            return
        if not line:
            continue
        try:
            for text in session.stream(line + "\n", **vars(sampling)):
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            if not interactive:
                raise
        print()
        if memory is not None:
            session.save(memory)


def inspect(path: Path, as_json: bool) -> None:
    """What a memory file or a model's folder holds, without running anything."""
    facts = _model_facts(path) if path.is_dir() else _memory_facts(path)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console = Console()
    layers, stores = facts.pop("layers", []), facts.pop("stores", [])
    table = Table(title=escape(str(path)), show_header=False)
    for name, value in facts.items():
        table.add_row(
            name, escape(f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else json.dumps(value))
        )
    console.print(table)
    if layers:
        table = Table("memory", "tokens written", "weights' norm", "momentum's norm", title="neural memories")
        for layer in layers:
            past = f"{layer['momentum_norm']:.4g}" if layer["momentum_norm"] is not None else "none"
            table.add_row(escape(layer["name"]), f"{layer['tokens']}", f"{layer['weight_norm']:.4g}", past)
        console.print(table)
    if stores:
        table = Table("store", "entries", "of", "ever written", title="kNN stores")
        for store in stores:
            table.add_row(escape(store["name"]), f"{store['entries']}", f"{store['size']:,}", f"{store['written']}")
        console.print(table)


def _model_facts(folder: Path) -> dict[str, Any]:
    model = Model.load(folder)
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
    header, tensors = memfile.peek(path, verify=True)
    layers = []
    for name in tensors:
        if not name.endswith(".layers.0"):
            continue
        stem = name.removesuffix("layers.0")
        parts = [tensor.double() for key, tensor in tensors.items() if key.startswith(f"{stem}layers.")]
        if f"{stem}position" not in tensors or any(part.dim() < 4 for part in parts):
            raise ValueError(f"{path}: {stem.rstrip('.')}: expected a memory's weights and position, got something else")
        norms = [sum(float(part[:, :, i].square().sum()) for part in parts) ** 0.5 for i in range(parts[0].shape[2])]
        layers.append(
            {
                "name": stem.rstrip("."),
                "tokens": tensors[f"{stem}position"].tolist(),
                "weight_norm": norms[0],
                "momentum_norm": norms[1] if len(norms) > 1 else None,
            }
        )
    return {
        "kind": "memory",
        "schema": header["schema"],
        "tokens": header["tokens"],
        "bytes": path.stat().st_size,
        "fingerprint": dict(zip(memfile.Fingerprint._fields, header["fingerprint"], strict=True)),
        "config": header["config"],
        "layers": layers,
        "stores": _store_facts(path, tensors),
    }


def _store_facts(path: Path, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    facts = []
    for name in tensors:
        if not name.endswith(".store.written"):
            continue
        stem = name.removesuffix(".written")
        position = tensors.get(f"{stem}.position")
        if position is None or position.dim() != 2:
            raise ValueError(f"{path}: {stem}: expected a store's entries and their positions, got something else")
        held = (position >= 0).sum(1).tolist()
        facts.append({"name": stem, "entries": held, "size": position.shape[1], "written": tensors[name].tolist()})
    return facts


def presets(as_json: bool, match: bool) -> None:
    """Every preset and variant: parameters at a vocabulary of 32,000, and what one sequence's state costs."""
    rows = []
    for name in PRESETS:
        for variant in BLOCKS:
            config = preset(name, variant, vocabulary=VOCABULARY)
            config = matched(config) if match else config
            rows.append({"preset": name, "variant": variant, "ffn": config.hidden, **_costs(config)})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"parameters at a vocabulary of {VOCABULARY:,}; the state of one sequence (bfloat16 model)")
    for column in ("preset", "variant", "parameters", "feed-forward", "state", "= tokens of bf16 KV cache"):
        table.add_column(column, justify="left" if column in ("preset", "variant") else "right")
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        grows = row["state_bytes"] is None
        state = ("grows", "as it reads") if grows else (f"{row['state_bytes'] / 2**20:,.2f} MiB", f"{row['kv_tokens']:,}")
        size = f"{row['parameters'] / 1e6:,.1f} M", f"{row['ffn']:,}"
        table.add_row(row["preset"], row["variant"], *size, *state, end_section=following["preset"] != row["preset"])
    Console().print(table)


def _costs(config: ModelConfig) -> dict[str, Any]:
    """Parameters; bytes of a state in a bfloat16 model; the tokens of a Transformer's bf16 cache that take as much."""
    with torch.device("meta"):
        model = Model(config).bfloat16()
        state = model.start(1)
    count = sum(parameter.numel() for parameter in model.parameters())
    if "attention" in config.blocks:
        return {"parameters": count, "state_bytes": None, "kv_tokens": None}
    per_token = 2 * 2 * config.dim * config.depth
    return {"parameters": count, "state_bytes": state.nbytes, "kv_tokens": round(state.nbytes / per_token)}
