"""Runs evaluation tasks. Each result is written at once, so that an interrupted evaluation can resume."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

import torch

import remanence
from remanence.config import MODES, Mode
from remanence.evaluate.bookmark import Bookmark
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task
from remanence.inference.memfile import fingerprint
from remanence.inference.threads import threads_for
from remanence.io.files import (
    append_line,
    display_name,
    locked_file,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from remanence.io.migrations import first_fields
from remanence.io.outputs import make_folder
from remanence.model import CausalModel
from remanence.runtime.choices import check_choice
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, Tokenizer

MADE_BY = "remanence eval"
ORIGIN = ("date", "commit", "hardware", "torch", "remanence")
"""The fields of a row's origin. They may differ between units if an evaluation was interrupted and resumed."""


class Journal:
    """Results of finished units by their settings, one line of JSON each. Without a path, only in memory."""

    def __init__(self, path: Path | None, owner: Setting) -> None:
        """`owner` identifies the subject. The journal of another subject is an error."""
        self.path, self.known, self.origins = path, dict[str, Result](), dict[str, Setting]()
        if path is None:
            return
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if len(lines) == 1:  # empty, or an incomplete first line after a kill
            path.write_bytes(b"")
            append_line(path, json.dumps({"owner": owner}))
            return
        if _line(lines[0]) != json.loads(json.dumps({"owner": owner})):
            hint = "give another name, or remove it"
            raise ValueError(
                f"{path}: expected results of this model and its tokenizer, got another's; {hint}"
            )
        for line in lines[1:]:
            entry = _line(line)
            if isinstance(entry, dict) and {"unit", "result"} <= entry.keys():
                self.known[_key(entry["unit"])] = entry["result"]
                self.origins[_key(entry["unit"])] = entry.get("origin") or {}

    def find(self, unit: Setting) -> Result | None:
        return self.known.get(_key(unit))

    def keep(self, unit: Setting, result: Result, origin: Setting | None = None) -> None:
        """`origin` is the date, commit, hardware and versions of the measurement."""
        self.known[_key(unit)], self.origins[_key(unit)] = result, origin or {}
        if self.path is not None:
            entry = {"unit": unit, "result": result, "origin": origin or {}}
            append_line(self.path, json.dumps(sealed(json.loads(json.dumps(entry)))))

    def origin(self, units: Sequence[Setting]) -> Setting:
        """The origin of several units: fields that differ between them become lists; None means unknown."""
        found = [self.origins[_key(unit)] for unit in units]
        values = {name: list(dict.fromkeys(each.get(name) for each in found)) for name in ORIGIN}
        return {name: own[0] if len(own) == 1 else own for name, own in values.items()}


def _line(line: bytes) -> Setting | None:
    """The content of a line; None if it is incomplete or damaged: its unit is then measured again."""
    try:
        found = json.loads(line)
        return unsealed("a line", found) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def _key(unit: Setting) -> str:
    return json.dumps(unit, sort_keys=True)


Show = Callable[[str, int, int], None]
"""Called with the current task and mode, the number of tokens read so far, and the approximate total of all tasks and
modes. Results in the journal count as read.
"""


def evaluate(
    subject: Subject,
    tasks: Sequence[Task],
    modes: Sequence[Mode] = ("on",),
    *,
    journal: Path | None = None,
    show: Show = lambda *_: None,
) -> list[Row]:
    """Measure every task in every memory mode. Results in the journal are not measured again."""
    for mode in modes:
        check_choice("memory_mode", mode, MODES)
        if subject.network is not None:
            subject.network.check_mode(mode)
    model = subject.network
    with (
        locked_file(journal, "another evaluation") if journal else nullcontext(),
        threads_for(model) if isinstance(model, CausalModel) else nullcontext(),
    ):
        return _evaluate(subject, tasks, modes, journal, show)


def _evaluate(
    subject: Subject, tasks: Sequence[Task], modes: Sequence[Mode], journal: Path | None, show: Show
) -> list[Row]:
    kept = Journal(journal, describe(subject))
    subject.bookmark = Bookmark(
        journal and journal.with_name(f"{journal.name.removesuffix('.units.jsonl')}.bookmark.mem")
    )
    rows, here = [], origin(subject)
    progress = _Progress.of(tasks, modes, kept, show)
    try:
        for task in tasks:
            for mode in modes:
                subject.mode = mode
                found, told = _measured(subject, task, mode, kept, progress, here)
                rows += [
                    replace(row, setting={"memory": mode, **row.setting}, origin=told)
                    for row in task.rows(found)
                ]
    finally:
        subject.mode = "on"
        subject.on_tokens = lambda _: None
    subject.bookmark.remove()
    return rows


def _unit_identity(task: Task, mode: Mode, unit: Setting) -> Setting:
    """All that a unit's result depends on."""
    return {"task": task.name, "memory": mode, **task.identity, **unit}


class _Progress:
    """The progress of an evaluation in tokens, over all tasks and modes."""

    def __init__(self, show: Show, done: int, total: int) -> None:
        self.show, self.done, self.total = show, done, total

    @classmethod
    def of(cls, tasks: Sequence[Task], modes: Sequence[Mode], kept: Journal, show: Show) -> _Progress:
        """Results in the journal count as done."""
        done = total = 0
        for task in tasks:
            for unit in (unit for group in task.units() for unit in group):
                known = sum(kept.find(_unit_identity(task, mode, unit)) is not None for mode in modes)
                cost = task.cost(unit)
                done, total = done + known * cost, total + len(modes) * cost
        progress = cls(show, done, total)
        progress.update(f"{tasks[0].name}, memory {modes[0]}", 0, 0)
        return progress

    def update(self, name: str, tokens: int, limit: int) -> None:
        """Show the tokens of finished units, plus those of the current units, up to their estimated cost."""
        self.show(name, self.done + min(tokens, limit), self.total)


def _measured(
    subject: Subject, task: Task, mode: Mode, kept: Journal, progress: _Progress, here: Setting
) -> tuple[list[tuple[Setting, Result]], Setting]:
    """The results of all units, and their common origin."""

    def depends(unit: Setting) -> Setting:
        return _unit_identity(task, mode, unit)

    groups, name = task.units(), f"{task.name}, memory {mode}"
    batch = getattr(task.settings, "batch", 1)
    for group in groups:
        missing = [unit for unit in group if kept.find(depends(unit)) is None]
        for start in range(0, len(missing), batch):
            units = missing[start : start + batch]
            cost, inside = sum(task.cost(unit) for unit in units), 0

            def count_tokens(count: int, cost: int = cost) -> None:
                nonlocal inside
                inside += count
                progress.update(name, inside, cost)

            subject.on_tokens = count_tokens
            subject.bookmark.unit = _key({"units": [depends(unit) for unit in units]})
            for unit, result in zip(units, task.measure(units), strict=True):
                kept.keep(depends(unit), result, here)
            progress.done += cost
            progress.update(name, 0, 0)
    units = [unit for group in groups for unit in group]
    found = [(unit, kept.known[_key(depends(unit))]) for unit in units]
    return found, kept.origin([depends(unit) for unit in units])


def describe(subject: Subject) -> Setting:
    """The identity of the subject: its recipe, or the fingerprints of its model and tokenizer."""
    if subject.recipe is not None:
        return {"recipe": first_fields("train", subject.recipe.to_dict())}
    return {
        "model": fingerprint(subject.evaluated)._asdict(),
        "tokenizer_digest": _tokenizer_digest(subject.tokens),
    }


def _tokenizer_digest(tokenizer: Tokenizer | None) -> str:
    """A digest of the tokenizer, as results depend on it; "bytes" for a model without one."""
    if (identity := getattr(tokenizer, "identity", None)) is not None:
        return _digest(identity)
    return _digest([tokenizer.text, tokenizer.end_text]) if isinstance(tokenizer, JsonTokenizer) else "bytes"


def provenance(subject: Subject) -> Setting:
    """The model, code, machine and date of a result. Rows measured earlier have their own origin."""
    return {
        **({"recipe": _digest(describe(subject))} if subject.recipe is not None else describe(subject)),
        "from": display_name(subject.source),
        **_training_facts(subject),
        "seed": subject.seed,
        **origin(subject),
    }


def origin(subject: Subject) -> Setting:
    """The origin of a measurement made now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(remanence.__file__).parent.parent),
        "hardware": hardware(subject.device),
        "torch": torch.__version__,
        "remanence": remanence.__version__,
    }


def _training_facts(subject: Subject) -> Setting:
    """The model's size, number of training tokens and tokenizer."""
    if subject.network is None:
        return {}
    tokens = subject.trained.get("tokens")
    words = (
        "bytes" if subject.tokens is None or isinstance(subject.tokens, ByteTokenizer) else "tokenizer.json"
    )
    return {
        "parameters": sum(parameter.numel() for parameter in subject.network.parameters()),
        "training_tokens": tokens if type(tokens) is int else None,
        "tokenizer": words if words == "bytes" else f"{words} of {subject.tokenizer.vocabulary:,} tokens",
    }


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def commit(root: Path) -> str | None:
    """The git commit of the package, with a + if files were changed; None outside of a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        name, changed = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+" if changed else "")


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return (
        f"{device.type}: {_processor()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
    )


def _processor() -> str:
    """The processor's name if the system gives it, else its architecture."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return next(
            line.split(":", 1)[1].strip() for line in told.splitlines() if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_rows(path: Path, rows: Sequence[Row], origin: Setting) -> None:
    """Write all rows with their provenance to one JSON file, atomically. Values that are not finite become null."""
    plain = []
    for row in rows:
        told = asdict(row)
        own = told.pop("origin") or {}
        plain.append({**told, "provenance": {**origin, **own}})
    write_json(path, sealed({"made_by": MADE_BY, "rows": _finite(plain)}))


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def check_target(path: Path) -> None:
    """Before any work: that nothing but an earlier evaluation's is overwritten, and that rows can be written there.

    Their folder is made.
    """
    if path.exists() and not _earlier(path):
        raise ValueError(
            f"--json: expected a new file, or an earlier evaluation's, got {path}; give another name, or remove it"
        )
    make_folder("--json", path)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--json: expected a folder that can be written to, got {path.parent} ({reason})"
        ) from None


def _earlier(path: Path) -> bool:
    """Whether a file is an evaluation's rows."""
    if not path.is_file():
        return False
    try:
        return bool(read_json(path).get("made_by") == MADE_BY)
    except ValueError:
        return False


def journal_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.units.jsonl")
