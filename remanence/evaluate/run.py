"""Run evaluation tasks. Each result is saved immediately, so that an interrupted evaluation can resume."""

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
from remanence.evaluate.checkpoint import ReadingCheckpoint
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task
from remanence.inference.memfile import fingerprint
from remanence.inference.threads import threads_for
from remanence.io.files import (
    add_digest,
    append_line,
    check_digest,
    display_name,
    locked_file,
    read_json,
    write_json,
)
from remanence.io.migrations import first_fields
from remanence.io.outputs import make_folder
from remanence.model import CausalModel
from remanence.runtime.choices import check_choice
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, Tokenizer

MADE_BY = "remanence eval"
"""Value of "made_by" in output files, by which an earlier evaluation is recognised."""
ORIGIN = ("date", "commit", "hardware", "torch", "remanence")
"""The fields of a row's origin. They may differ between units if an evaluation was interrupted and resumed."""


class Journal:
    """Results of finished units by their settings, saved as one JSON line each.

    If `path` is None, results are only kept in memory.
    """

    def __init__(self, path: Path | None, owner: Setting) -> None:
        """Open or create a journal. `owner` identifies the subject; the journal of another subject raises an
        error.
        """
        self.path, self.results, self.origins = path, dict[str, Result](), dict[str, Setting]()
        if path is None:
            return
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if len(lines) == 1:  # empty file, or incomplete first line because the process was killed
            path.write_bytes(b"")
            append_line(path, json.dumps({"owner": owner}))
            return
        if _parse_line(lines[0]) != json.loads(json.dumps({"owner": owner})):
            hint = "give another name, or remove it"
            raise ValueError(
                f"{path}: expected results of this model and its tokenizer, got another's; {hint}"
            )
        for line in lines[1:]:
            entry = _parse_line(line)
            if isinstance(entry, dict) and {"unit", "result"} <= entry.keys():
                self.results[_unit_key(entry["unit"])] = entry["result"]
                self.origins[_unit_key(entry["unit"])] = entry.get("origin") or {}

    def find(self, unit: Setting) -> Result | None:
        """Return the result of a unit, or None if it was not measured yet."""
        return self.results.get(_unit_key(unit))

    def record(self, unit: Setting, result: Result, origin: Setting | None = None) -> None:
        """Store the result of a unit. `origin` is the date, commit, hardware and versions of the measurement."""
        self.results[_unit_key(unit)], self.origins[_unit_key(unit)] = result, origin or {}
        if self.path is not None:
            entry = {"unit": unit, "result": result, "origin": origin or {}}
            append_line(self.path, json.dumps(add_digest(json.loads(json.dumps(entry)))))

    def origin(self, units: Sequence[Setting]) -> Setting:
        """Return the common origin of several units. Fields that differ become lists; None means unknown."""
        found = [self.origins[_unit_key(unit)] for unit in units]
        values = {name: list(dict.fromkeys(each.get(name) for each in found)) for name in ORIGIN}
        return {name: own[0] if len(own) == 1 else own for name, own in values.items()}


def _parse_line(line: bytes) -> Setting | None:
    """Parse a line of the journal. None if it is incomplete or damaged; its unit is then measured again."""
    try:
        found = json.loads(line)
        return check_digest("a line", found) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def _unit_key(unit: Setting) -> str:
    """Return the settings of a unit as a string, to use as a dictionary key."""
    return json.dumps(unit, sort_keys=True)


Show = Callable[[str, int, int], None]
"""Progress callback. It is called with the current task and mode, the number of tokens read so far, and the
approximate total of all tasks and modes. Results in the journal count as read.
"""


def evaluate(
    subject: Subject,
    tasks: Sequence[Task],
    modes: Sequence[Mode] = ("on",),
    *,
    journal: Path | None = None,
    show: Show = lambda *_: None,
) -> list[Row]:
    """Measure every task in every memory mode and return the rows.

    Results in the file `journal` are not measured again. If it is None, results are not saved. `show` is
    called to report progress.
    """
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
    subject: Subject, tasks: Sequence[Task], modes: Sequence[Mode], journal_file: Path | None, show: Show
) -> list[Row]:
    """Implement `evaluate` while the journal file is locked."""
    journal = Journal(journal_file, describe(subject))
    subject.checkpoint = ReadingCheckpoint(
        journal_file
        and journal_file.with_name(f"{journal_file.name.removesuffix('.units.jsonl')}.bookmark.mem")
    )
    rows, origin_now = [], origin(subject)
    progress = _Progress.start(tasks, modes, journal, show)
    try:
        for task in tasks:
            for mode in modes:
                subject.memory_mode = mode
                unit_results, task_origin = _measure_units(subject, task, mode, journal, progress, origin_now)
                rows += [
                    replace(row, setting={"memory": mode, **row.setting}, origin=task_origin)
                    for row in task.rows(unit_results)
                ]
    finally:
        subject.memory_mode = "on"
        subject.on_tokens = lambda _: None
    subject.checkpoint.remove()
    return rows


def _unit_identity(task: Task, memory_mode: Mode, unit: Setting) -> Setting:
    """Return everything that a unit's result depends on, apart from the subject."""
    return {"task": task.name, "memory": memory_mode, **task.identity, **unit}


class _Progress:
    """The progress of an evaluation in tokens, over all tasks and modes."""

    def __init__(self, show: Show, done: int, total: int) -> None:
        self.show, self.done, self.total = show, done, total

    @classmethod
    def start(cls, tasks: Sequence[Task], modes: Sequence[Mode], journal: Journal, show: Show) -> _Progress:
        """Compute the total cost of all tasks and modes. Results in the journal count as done."""
        done = total = 0
        for task in tasks:
            for unit in (unit for group in task.units() for unit in group):
                num_measured = sum(
                    journal.find(_unit_identity(task, mode, unit)) is not None for mode in modes
                )
                cost = task.cost(unit)
                done, total = done + num_measured * cost, total + len(modes) * cost
        progress = cls(show, done, total)
        progress.update(f"{tasks[0].name}, memory {modes[0]}", 0, 0)
        return progress

    def update(self, name: str, tokens: int, limit: int) -> None:
        """Show the tokens of finished units plus `tokens` of the current units, the latter at most `limit`."""
        self.show(name, self.done + min(tokens, limit), self.total)


def _measure_units(
    subject: Subject, task: Task, memory_mode: Mode, journal: Journal, progress: _Progress, origin: Setting
) -> tuple[list[tuple[Setting, Result]], Setting]:
    """Measure the missing units of a task in one mode.

    Returns all units with their results, and the common origin of the results.
    """

    def identity_of(unit: Setting) -> Setting:
        return _unit_identity(task, memory_mode, unit)

    groups, name = task.units(), f"{task.name}, memory {memory_mode}"
    batch = getattr(task.settings, "batch", 1)
    for group in groups:
        unmeasured = [unit for unit in group if journal.find(identity_of(unit)) is None]
        for start in range(0, len(unmeasured), batch):
            units = unmeasured[start : start + batch]
            cost, tokens_done = sum(task.cost(unit) for unit in units), 0

            def count_tokens(count: int, cost: int = cost) -> None:
                nonlocal tokens_done
                tokens_done += count
                progress.update(name, tokens_done, cost)

            subject.on_tokens = count_tokens
            subject.checkpoint.unit = _unit_key({"units": [identity_of(unit) for unit in units]})
            for unit, result in zip(units, task.measure(units), strict=True):
                journal.record(identity_of(unit), result, origin)
            progress.done += cost
            progress.update(name, 0, 0)
    units = [unit for group in groups for unit in group]
    found = [(unit, journal.results[_unit_key(identity_of(unit))]) for unit in units]
    return found, journal.origin([identity_of(unit) for unit in units])


def describe(subject: Subject) -> Setting:
    """Return the identity of the subject: its recipe, or the fingerprints of its model and tokenizer."""
    if subject.recipe is not None:
        return {"recipe": first_fields("train", subject.recipe.to_dict())}
    return {
        "model": fingerprint(subject.evaluated)._asdict(),
        "tokenizer_digest": _tokenizer_digest(subject.tokens),
    }


def _tokenizer_digest(tokenizer: Tokenizer | None) -> str:
    """Return a digest of the tokenizer, because results depend on it, or "bytes" for a model without one."""
    if (identity := getattr(tokenizer, "identity", None)) is not None:
        return _digest(identity)
    return _digest([tokenizer.text, tokenizer.end_text]) if isinstance(tokenizer, JsonTokenizer) else "bytes"


def provenance(subject: Subject) -> Setting:
    """Return the model, code, machine and date of a result. Rows measured earlier have their own origin."""
    return {
        **({"recipe": _digest(describe(subject))} if subject.recipe is not None else describe(subject)),
        "from": display_name(subject.source),
        **_training_facts(subject),
        "seed": subject.seed,
        **origin(subject),
    }


def origin(subject: Subject) -> Setting:
    """Return the origin (date, commit, hardware, versions) of a measurement made now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(remanence.__file__).parent.parent),
        "hardware": hardware(subject.device),
        "torch": torch.__version__,
        "remanence": remanence.__version__,
    }


def _training_facts(subject: Subject) -> Setting:
    """Return the model's number of parameters, number of training tokens (None if unknown) and tokenizer."""
    if subject.network is None:
        return {}
    tokens = subject.trained.get("tokens")
    tokenizer_name = (
        "bytes" if subject.tokens is None or isinstance(subject.tokens, ByteTokenizer) else "tokenizer.json"
    )
    return {
        "parameters": sum(parameter.numel() for parameter in subject.network.parameters()),
        "training_tokens": tokens if type(tokens) is int else None,
        "tokenizer": tokenizer_name
        if tokenizer_name == "bytes"
        else f"{tokenizer_name} of {subject.tokenizer.vocabulary:,} tokens",
    }


def _digest(data: object) -> str:
    """Return a digest of JSON data, as 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def commit(root: Path) -> str | None:
    """Return the git commit of the package, followed by + if files were changed. None outside a git checkout."""
    if not (root / ".git").exists():
        return None
    try:
        name, changed = (
            subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+" if changed else "")


def hardware(device: torch.device) -> str:
    """Return a description of the device: the name of the GPU, or the processor with its cores and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return (
        f"{device.type}: {_processor()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
    )


def _processor() -> str:
    """Return the processor's name if the system provides it, else its architecture."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return next(
            line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_rows(path: Path, rows: Sequence[Row], origin: Setting) -> None:
    """Write all rows with their provenance to one JSON file, atomically. Values that are not finite become
    null.
    """
    entries = []
    for row in rows:
        entry = asdict(row)
        row_origin = entry.pop("origin") or {}
        entries.append({**entry, "provenance": {**origin, **row_origin}})
    write_json(path, add_digest({"made_by": MADE_BY, "rows": _replace_nonfinite(entries)}))


def _replace_nonfinite(data: object) -> object:
    """Replace all floats that are not finite by None, in nested JSON data."""
    if isinstance(data, dict):
        return {name: _replace_nonfinite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace_nonfinite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def check_target(path: Path) -> None:
    """Create the folder of the output file, and check that rows can be written to it.

    Raise an error if the file exists and was not written by an earlier evaluation. Called before any work is
    done.
    """
    if path.exists() and not _is_evaluation(path):
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


def _is_evaluation(path: Path) -> bool:
    """Whether a file was written by an earlier evaluation."""
    if not path.is_file():
        return False
    try:
        return bool(read_json(path).get("made_by") == MADE_BY)
    except ValueError:
        return False


def journal_path(path: Path) -> Path:
    """Return the path of the journal that belongs to an output file."""
    return path.with_name(f"{path.stem}.units.jsonl")
