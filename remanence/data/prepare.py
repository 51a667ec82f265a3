"""From texts to token shards: in parallel, and resumable.

A file makes one shard; each file of a streamed dataset makes shards of a bounded size. A shard depends on its source
alone, so that any number of processes, interrupted any number of times, makes the same ones. What the folder is made
of is noted before the first of them (`prepare.json`), so that it never holds shards of two corpora.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import Event, synchronize
from pathlib import Path
from typing import Any, TypedDict

from remanence.data import streams
from remanence.data.shards import (
    FORMAT,
    INDEX,
    NAME,
    TOKENIZER,
    Room,
    ShardInfo,
    TokenType,
    cut_shard,
    describes_shard,
    dtype_for,
    shard_exists,
    write_index,
    write_shard,
)
from remanence.data.sources import File, files
from remanence.io.files import locked, read_json, remove_leftovers, sealed, write_json
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_file

PLAN, PLAN_FORMAT = "prepare.json", "remanence-preparation"
"""What the shards of a folder are made of."""
SHARD = rf"{NAME}\.(bin|ends|json)"
OWN = "|".join((*map(re.escape, (PLAN, INDEX, "sources.json", *TOKENIZER)), SHARD))
"""The names of all files that a preparation writes; sources.json was a part of the plan in earlier versions."""

Done = Callable[[int, int, int], None]
Shard = ShardInfo
Plan = dict[str, Any]


class _Settings(TypedDict):
    """What all shards depend on: the field of texts, the digest of the tokenizer's file, the token after a document."""

    field: str
    tokenizer: str | None
    end: int | None


def prepare(
    sources: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    field: str = "text",
    workers: int = 1,
    max_tokens: int | None = None,
    max_documents: int | None = None,
    shard_tokens: int = streams.FULL,
    overwrite: bool = False,
    done: Done | None = None,
) -> dict[str, int]:
    """Write every document of the sources to `out` as tokens, each followed by the tokenizer's end mark.

    A source is a file, a folder, or ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``, a dataset of the hub. Rows whose text is
    null are skipped and counted. With a limit, the documents are the first ones, in order, as long as one fits.

    Run again after an interruption, it goes on: a shard made from the same source is not made again, and a dataset is
    read at the revision of the first run. So a limit can be raised or lowered later. Other sources, one more, or one
    that has changed, another tokenizer or field make another corpus. A folder that holds one is refused, unless
    `overwrite` says to replace it; shards that both have in common stay, and datasets are read at their newest
    revision. A folder with files that no preparation wrote is always refused.

    `done(finished, sources, tokens)` is called as shards are finished, with the number of files.
    """
    out = Path(out)
    for name, value in (("workers", workers), ("max_tokens", max_tokens), ("max_documents", max_documents)):
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    tokenizer = None if tokenizer is None else tokenizer_file(tokenizer)
    own = _tokenizer(tokenizer)
    digest = None if tokenizer is None else sha256(Path(tokenizer).read_bytes()).hexdigest()
    settings: _Settings = {"field": field, "tokenizer": digest, "end": own.end}
    with locked(out, "another preparation"):
        pinned = {} if overwrite else _revisions(_read_plan(out))
        parts = _parts([str(source) for source in sources], pinned, shard_tokens)
        jobs = [
            _Job(part, number, out, tokenizer, settings, dtype_for(own.vocabulary))
            for number, part in enumerate(parts)
        ]
        _claim(out, {"sources": [part.made_from() for part in parts], **settings}, jobs, overwrite)
        own.save(out)
        return _make(
            jobs, Room(max_tokens, max_documents), min(workers, len(jobs)), own.vocabulary, out, done
        )


def _make(
    jobs: list[_Job], room: Room, workers: int, vocabulary: int, out: Path, done: Done | None
) -> dict[str, int]:
    """All shards that have room, and the index of them."""
    if workers > 1:
        _make_in_parallel(jobs, workers, room, done)
        done = None
    shards: list[Shard] = []
    begun = tokens = 0
    for job in jobs:  # in order, which says where a limit falls; what is there already costs nothing
        begun += 1
        for shard in job.shards(room):
            shards.append(shard)
            room, tokens = room.after(shard), tokens + shard["tokens"]
            if done:
                done(begun - (_stopped(shard) == "full"), len(jobs), tokens)
        if room.used_up or _stopped(shards[-1]) == "room":
            break
    write_index(out, shards, vocabulary)
    totals = {key: sum(shard.get(key, 0) for shard in shards) for key in ("documents", "tokens", "nulls")}
    return {"files": begun, **totals}


def _parts(sources: list[str], pinned: dict[str, str], full: int) -> list[File | streams.Part]:
    """Everything to read, in order; sources of both kinds may be mixed."""
    found: list[File | streams.Part] = []
    for source in sources:
        if source.startswith(streams.PREFIX):
            found += streams.parts(source, pinned.get(source), full)
        else:
            found += [File(path) for path in files([Path(source)])]
    return found


def _revisions(plan: Plan) -> dict[str, str]:
    """Of datasets, which may change on the hub before they are read to their end."""
    return {part["source"]: part["revision"] for part in plan.get("sources", ()) if "revision" in part}


def _read_plan(out: Path) -> Plan:
    """What the shards in a folder are made of; empty without a plan."""
    if not (out / PLAN).is_file():
        return {}
    plan = read_json(out / PLAN)
    sources = plan.get("sources")
    if plan.pop("format", None) != PLAN_FORMAT or not isinstance(sources, list):
        raise ValueError(f"{out / PLAN}: expected {PLAN_FORMAT}, got another file; choose another --out")
    if not all(isinstance(part, dict) and isinstance(part.get("source"), str) for part in sources):
        raise ValueError(f"{out / PLAN}: damaged: it does not name the sources; remove {out}")
    return plan


def _claim(out: Path, plan: Plan, jobs: list[_Job], overwrite: bool) -> None:
    """Reserve a folder for one corpus and write its plan, before the first shard."""
    before, there = _read_plan(out), _own_files(out)
    if before == plan:
        return
    if any(re.fullmatch(SHARD, name) for name in there) and not overwrite:
        difference = _difference(before, plan)
        raise ValueError(
            f"{out}: holds another corpus, {difference}; --overwrite replaces it, another --out keeps both"
        )
    kept = {shard["name"] for job in jobs for shard in job.there()}
    # What says that the files are ours goes last: a second try must know it, too.
    for name in sorted(there, key=lambda name: name == INDEX):
        if name != PLAN and name.split(".")[0] not in kept:
            (out / name).unlink()
    write_json(out / PLAN, sealed({"format": PLAN_FORMAT, **plan}))


def _own_files(out: Path) -> list[str]:
    """The names of what earlier preparations wrote to a folder; what killed ones left is removed.

    Files by anyone else are refused, and never touched; hidden ones (of a desktop, of a network's disk) may stay.
    """
    remove_leftovers(out)
    names = sorted(path.name for path in out.iterdir())
    visible = [name for name in names if not name.startswith(".")]
    ours = (out / PLAN).is_file() or _prepared(out)  # else a tokenizer.json may be anyone's
    strangers = [name for name in visible if not ours or not re.fullmatch(OWN, name)]
    if strangers:
        raise ValueError(
            f"{out}: expected a folder for this corpus alone, got {strangers[0]} in it; choose another --out"
        )
    return visible


def _prepared(out: Path) -> bool:
    """Whether an index says that the folder is ours: earlier versions wrote no plan."""
    with suppress(ValueError, OSError):
        return read_json(out / INDEX).get("format") == FORMAT
    return False


def _difference(before: Plan, plan: Plan) -> str:
    """What is in a folder, in a few words, and how it differs."""
    if not before:
        return "prepared by an earlier version"
    there, wanted = (
        list(dict.fromkeys(part["source"] for part in each["sources"])) for each in (before, plan)
    )
    words = f"of {', '.join(there[:3])}" + (f" and {len(there) - 3} more" if len(there) > 3 else "")
    if there != wanted:
        return words
    if before.get("field") != plan["field"]:
        return f"{words}, with --field {before.get('field')}"
    if any(before.get(name) != plan[name] for name in ("tokenizer", "end")):
        return f"{words}, with another tokenizer"
    pairs = zip(before["sources"], plan["sources"], strict=False)
    changed = next((old["source"] for old, new in pairs if old != new), there[-1])
    return f"{words}, before {changed} changed"


def _tokenizer(path: str | Path | None) -> Tokenizer:
    return ByteTokenizer() if path is None else read_tokenizer(Path(path))


@dataclass(frozen=True)
class _Job:
    """The shards of one source."""

    part: File | streams.Part
    number: int
    out: Path
    tokenizer: str | Path | None
    settings: _Settings
    dtype: TokenType

    def shards(self, room: Room) -> Iterator[Shard]:
        """All of them, or those that have room: what is missing is made."""
        row, documents, own = 0, None, _tokenizer(self.tokenizer)
        for name in self.part.names(self.number):
            shard, made_from = self._there(name, row), self._made_from(row)
            if shard is not None and not room.holds(shard["tokens"], shard["documents"]):
                self._invalidate(name)
                cut_down = cut_shard(self.out, shard, self.dtype, room)
                shard = self._note({**cut_down, "from": made_from, "room": room})
            elif shard is None or shard.get("room", list(room)) != list(room):
                self._invalidate(name)
                documents = documents or self._tokens(own, row)
                full = self.part.full
                made = write_shard(self.out, name, documents, self.dtype, end=own.end, full=full, room=room)
                cut = {"room": room} if made["stopped"] == "room" else {}
                shard = self._note({**made, "from": made_from, **cut})
            else:
                documents = None  # an open stream is before what exists already
            yield shard
            if _stopped(shard) != "full" or (room := room.after(shard)).used_up:
                return
            row += shard["rows"]

    def there(self) -> Iterator[Shard]:
        """Those that are made already, up to the first that is not."""
        row = 0
        for name in self.part.names(self.number):
            if (shard := self._there(name, row)) is None:
                return
            yield shard
            if _stopped(shard) != "full":
                return
            row += shard["rows"]

    def _made_from(self, row: int) -> dict[str, object]:
        """What a shard depends on."""
        return {**self.part.made_from(), **self.settings, **({"row": row} if row else {})}

    def _there(self, name: str, row: int) -> Shard | None:
        """A shard that is complete. Without a note that fits, it is made again."""
        try:
            shard = read_json(self.out / f"{name}.json")
        except (ValueError, FileNotFoundError):
            return None
        fits = shard.get("name") == name and shard.get("from") == self._made_from(row)
        if not fits or not describes_shard(shard, self.dtype) or type(shard.get("rows")) is not int:
            return None
        return shard if shard_exists(self.out, shard, self.dtype) else None

    def _invalidate(self, name: str) -> None:
        """Remove the files that mark a shard and the corpus as complete, before the shard is changed."""
        for path in (self.out / f"{name}.json", self.out / INDEX):
            path.unlink(missing_ok=True)

    def _note(self, shard: Shard) -> Shard:
        """Written last: it marks the shard as complete."""
        write_json(self.out / f"{shard['name']}.json", sealed(shard))
        return shard

    def _tokens(self, own: Tokenizer, row: int) -> Iterator[Iterator[list[int]] | None]:
        for document in self.part.documents(self.settings["field"], row):
            if _halt is not None and _halt.is_set():
                raise _HaltedError
            yield None if document is None else own.stream(document)


def _stopped(shard: Shard) -> str:
    return str(shard.get("stopped", "end"))


class _HaltedError(Exception):
    """Raised in a process that has nothing more to do."""


_halt: synchronize.Event | None = None
"""In the processes of a pool: an event that ends what they do, when a limit is reached or another has failed."""


def _make_in_parallel(jobs: list[_Job], workers: int, room: Room, done: Done | None) -> None:
    """Make shards in several processes, until all are there, or as many as there is room for.

    Each process reads a source of its own and knows nothing of the others. With a limit, some shards may therefore not
    be needed, or be too large. The pass in order that follows corrects that.
    """
    halt = Event()
    there = {job.number: list(job.there()) for job in jobs}
    waiting = deque(job for job in jobs if not _finished(there[job.number]))
    running: dict[Future[list[Shard]], _Job] = {}
    looked = time.monotonic()
    if not waiting or _reached(there, room):
        return
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(halt, os.getpid())) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    job = waiting.popleft()
                    running[pool.submit(_work, job, room)] = job
                for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                    there[running.pop(future).number] = future.result()
                if time.monotonic() - looked >= 1 or not running:
                    there |= {job.number: list(job.there()) for job in running.values()}
                    looked = time.monotonic()
                    if done:
                        tokens = sum(shard["tokens"] for shards in there.values() for shard in shards)
                        done(sum(_finished(shards) for shards in there.values()), len(jobs), tokens)
                    if _reached(there, room):
                        return
        except BrokenProcessPool:
            raise OSError(
                "--workers: a process was ended from outside, perhaps for want of memory; try fewer"
            ) from None
        finally:
            halt.set()
            pool.shutdown(cancel_futures=True)


def _finished(shards: list[Shard]) -> bool:
    """Whether a source was read to its end."""
    return bool(shards) and _stopped(shards[-1]) == "end"


def _reached(there: dict[int, list[Shard]], room: Room) -> bool:
    """Whether what is there in order, up to the first gap, is all that has room."""
    for number in sorted(there):
        for shard in there[number]:
            if shard.get("room") == list(room):
                return True
            room = room.after(shard)
            if room.used_up:
                return True
        if not _finished(there[number]):
            return False
    return False


def _start(halt: synchronize.Event, parent: int) -> None:
    global _halt
    _halt = halt
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Exit when the parent process is gone: its successor may write the same files."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(job: _Job, room: Room) -> list[Shard]:
    made = []
    with suppress(_HaltedError):
        for shard in job.shards(room):
            made.append(shard)
    return made
