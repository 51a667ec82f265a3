"""Convert texts to token shards, in parallel and resumably.

A file makes one shard; each file of a streamed dataset makes several shards of bounded size. A shard depends
only on its source, so any number of processes, interrupted any number of times, makes the same shards. The
list of sources is written to `prepare.json` before the first shard, so that a folder never holds shards of
two corpora.
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
    RemainingLimit,
    ShardInfo,
    TokenType,
    describes_shard,
    dtype_for,
    shard_exists,
    truncate_shard,
    write_index,
    write_shard,
)
from remanence.data.sources import File, files
from remanence.io.files import add_digest, locked, read_json, remove_leftovers, write_json
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_file

PLAN, PLAN_FORMAT = "prepare.json", "remanence-preparation"
"""The file that lists the sources of a folder's shards (the plan), and the plan's format name."""
SHARD = rf"{NAME}\.(bin|ends|json)"
"""The pattern of the names of a shard's files."""
OWN = "|".join((*map(re.escape, (PLAN, INDEX, "sources.json", *TOKENIZER)), SHARD))
"""The pattern of the names of all files that a preparation writes. Earlier versions wrote sources.json as
part of the plan.
"""

Done = Callable[[int, int, int], None]
"""A progress callback: `done(finished, sources, tokens)`."""
Shard = ShardInfo
Plan = dict[str, Any]
"""The content of `prepare.json` without its format: the sources and the settings."""


class _Settings(TypedDict):
    """Settings that all shards depend on: the field that holds the text, the digest of the tokenizer's file
    (None for the byte tokenizer), and the token after each document (None if there is none).
    """

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
    """Write all documents of the sources to the folder `out` as tokens, each followed by the tokenizer's end
    token.

    A source is a file, a folder, or ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``, a dataset on the Hugging Face
    hub. Rows whose text is null are skipped and counted. With a limit, documents are written in order until
    one does not fit.

    After an interruption, the same call continues: shards that were already made from the same source are
    kept, and a dataset is read at the revision of the first run. A limit can therefore be raised or lowered
    later. If the sources, the tokenizer or the field have changed, the result is another corpus. If `out`
    holds another corpus, an error is raised, unless `overwrite` is set; then shards that both corpora share
    are kept, and datasets are read at their newest revision. A folder with files that no preparation wrote
    always raises an error.

    `done(finished, sources, tokens)` is called as shards are finished with the number of finished files, the
    number of all files, and the number of tokens written. Returns the numbers of files, documents, tokens and
    nulls.
    """
    out = Path(out)
    for name, value in (("workers", workers), ("max_tokens", max_tokens), ("max_documents", max_documents)):
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    tokenizer = None if tokenizer is None else tokenizer_file(tokenizer)
    loaded_tokenizer = _tokenizer(tokenizer)
    digest = None if tokenizer is None else sha256(Path(tokenizer).read_bytes()).hexdigest()
    settings: _Settings = {"field": field, "tokenizer": digest, "end": loaded_tokenizer.end}
    with locked(out, "another preparation"):
        pinned = {} if overwrite else _pinned_revisions(_read_plan(out))
        parts = _list_parts([str(source) for source in sources], pinned, shard_tokens)
        jobs = [
            _Job(part, number, out, tokenizer, settings, dtype_for(loaded_tokenizer.vocabulary))
            for number, part in enumerate(parts)
        ]
        _claim_folder(out, {"sources": [part.made_from() for part in parts], **settings}, jobs, overwrite)
        loaded_tokenizer.save(out)
        return _make_corpus(
            jobs,
            RemainingLimit(max_tokens, max_documents),
            min(workers, len(jobs)),
            loaded_tokenizer.vocabulary,
            out,
            done,
        )


def _make_corpus(
    jobs: list[_Job], remaining: RemainingLimit, workers: int, vocabulary: int, out: Path, done: Done | None
) -> dict[str, int]:
    """Make all shards that fit into `remaining` and write the index. Returns the totals for `prepare`."""
    if workers > 1:
        _make_in_parallel(jobs, workers, remaining, done)
        done = None
    shards: list[Shard] = []
    started = tokens = 0
    for job in jobs:  # in order, because a limit leaves out the last documents; existing shards are kept
        started += 1
        for shard in job.shards(remaining):
            shards.append(shard)
            remaining, tokens = remaining.after(shard), tokens + shard["tokens"]
            if done:
                done(started - (_stop_reason(shard) == "full"), len(jobs), tokens)
        if remaining.used_up or _stop_reason(shards[-1]) == "room":
            break
    write_index(out, shards, vocabulary)
    totals = {key: sum(shard.get(key, 0) for shard in shards) for key in ("documents", "tokens", "nulls")}
    return {"files": started, **totals}


def _list_parts(sources: list[str], pinned: dict[str, str], full: int) -> list[File | streams.Part]:
    """Return all files and dataset parts to read, in order. Both kinds of sources may be mixed."""
    found: list[File | streams.Part] = []
    for source in sources:
        if source.startswith(streams.PREFIX):
            found += streams.parts(source, pinned.get(source), full)
        else:
            found += [File(path) for path in files([Path(source)])]
    return found


def _pinned_revisions(plan: Plan) -> dict[str, str]:
    """Return the revision of each dataset in a plan. It is needed to continue, as a dataset may change on the
    hub meanwhile.
    """
    return {part["source"]: part["revision"] for part in plan.get("sources", ()) if "revision" in part}


def _read_plan(out: Path) -> Plan:
    """Read the plan of a folder. Returns an empty dictionary if there is none."""
    if not (out / PLAN).is_file():
        return {}
    plan = read_json(out / PLAN)
    sources = plan.get("sources")
    if plan.pop("format", None) != PLAN_FORMAT or not isinstance(sources, list):
        raise ValueError(f"{out / PLAN}: expected {PLAN_FORMAT}, got another file; choose another --out")
    if not all(isinstance(part, dict) and isinstance(part.get("source"), str) for part in sources):
        raise ValueError(f"{out / PLAN}: damaged: it does not name the sources; remove {out}")
    return plan


def _claim_folder(out: Path, plan: Plan, jobs: list[_Job], overwrite: bool) -> None:
    """Reserve a folder for one corpus: remove files of another corpus if `overwrite`, and write the plan.
    Raises ValueError if the folder holds another corpus and `overwrite` is False.
    """
    previous, present = _read_plan(out), _list_files(out)
    if previous == plan:
        return
    if any(re.fullmatch(SHARD, name) for name in present) and not overwrite:
        difference = _describe_difference(previous, plan)
        raise ValueError(
            f"{out}: holds another corpus, {difference}; --overwrite replaces it, another --out keeps both"
        )
    kept = {shard["name"] for job in jobs for shard in job.existing_shards()}
    # The index marks the files as ours. It is removed last, so that a second attempt recognises them.
    for name in sorted(present, key=lambda name: name == INDEX):
        if name != PLAN and name.split(".")[0] not in kept:
            (out / name).unlink()
    write_json(out / PLAN, add_digest({"format": PLAN_FORMAT, **plan}))


def _list_files(out: Path) -> list[str]:
    """Return the names of the visible files in a folder after removing leftovers of killed processes.

    Raises ValueError if there are files that no preparation wrote. Hidden files (of a desktop or a network
    disk) may stay.
    """
    remove_leftovers(out)
    names = sorted(path.name for path in out.iterdir())
    visible = [name for name in names if not name.startswith(".")]
    is_ours = (out / PLAN).is_file() or _has_index(out)  # otherwise a tokenizer.json may have another origin
    foreign = [name for name in visible if not is_ours or not re.fullmatch(OWN, name)]
    if foreign:
        raise ValueError(
            f"{out}: expected a folder for this corpus alone, got {foreign[0]} in it; choose another --out"
        )
    return visible


def _has_index(out: Path) -> bool:
    """Whether the folder has an index of this package. Needed because earlier versions wrote no plan."""
    with suppress(ValueError, OSError):
        return read_json(out / INDEX).get("format") == FORMAT
    return False


def _describe_difference(previous: Plan, plan: Plan) -> str:
    """Describe in a few words the corpus in a folder and how it differs from the wanted one, for an error
    message.
    """
    if not previous:
        return "prepared by an earlier version"
    old_sources, new_sources = (
        list(dict.fromkeys(part["source"] for part in each["sources"])) for each in (previous, plan)
    )
    description = f"of {', '.join(old_sources[:3])}" + (
        f" and {len(old_sources) - 3} more" if len(old_sources) > 3 else ""
    )
    if old_sources != new_sources:
        return description
    if previous.get("field") != plan["field"]:
        return f"{description}, with --field {previous.get('field')}"
    if any(previous.get(name) != plan[name] for name in ("tokenizer", "end")):
        return f"{description}, with another tokenizer"
    pairs = zip(previous["sources"], plan["sources"], strict=False)
    changed = next((old["source"] for old, new in pairs if old != new), old_sources[-1])
    return f"{description}, before {changed} changed"


def _tokenizer(path: str | Path | None) -> Tokenizer:
    """Return the tokenizer of a file, or the byte tokenizer if `path` is None."""
    return ByteTokenizer() if path is None else read_tokenizer(Path(path))


@dataclass(frozen=True)
class _Job:
    """One source, and the work of making its shards. `number` is the index of the source."""

    part: File | streams.Part
    number: int
    out: Path
    tokenizer: str | Path | None
    settings: _Settings
    dtype: TokenType

    def shards(self, remaining: RemainingLimit) -> Iterator[Shard]:
        """Yield the source's shards as far as they fit into `remaining`. Missing shards are made."""
        row, documents, tokenizer = 0, None, _tokenizer(self.tokenizer)
        for name in self.part.names(self.number):
            shard, made_from = self._existing_shard(name, row), self._provenance(row)
            if shard is not None and not remaining.allows(shard["tokens"], shard["documents"]):
                self._invalidate(name)
                cut_down = truncate_shard(self.out, shard, self.dtype, remaining)
                shard = self._write_description({**cut_down, "from": made_from, "room": remaining})
            elif shard is None or shard.get("room", list(remaining)) != list(remaining):
                self._invalidate(name)
                documents = documents or self._tokens(tokenizer, row)
                full = self.part.full
                made = write_shard(
                    self.out,
                    name,
                    documents,
                    self.dtype,
                    end=tokenizer.end,
                    full_size=full,
                    remaining=remaining,
                )
                cut = {"room": remaining} if made["stopped"] == "room" else {}
                shard = self._write_description({**made, "from": made_from, **cut})
            else:
                documents = None  # an open stream would be at the wrong row after a shard that was skipped
            yield shard
            if _stop_reason(shard) != "full" or (remaining := remaining.after(shard)).used_up:
                return
            row += shard["rows"]

    def existing_shards(self) -> Iterator[Shard]:
        """Yield the shards that already exist, up to the first missing one."""
        row = 0
        for name in self.part.names(self.number):
            if (shard := self._existing_shard(name, row)) is None:
                return
            yield shard
            if _stop_reason(shard) != "full":
                return
            row += shard["rows"]

    def _provenance(self, row: int) -> dict[str, object]:
        """Return everything that the shard starting at source row `row` depends on."""
        return {**self.part.made_from(), **self.settings, **({"row": row} if row else {})}

    def _existing_shard(self, name: str, row: int) -> Shard | None:
        """Return the description of a complete shard, or None if it is missing or was made from something
        else.
        """
        try:
            shard = read_json(self.out / f"{name}.json")
        except (ValueError, FileNotFoundError):
            return None
        matches = shard.get("name") == name and shard.get("from") == self._provenance(row)
        if not matches or not describes_shard(shard, self.dtype) or type(shard.get("rows")) is not int:
            return None
        return shard if shard_exists(self.out, shard, self.dtype) else None

    def _invalidate(self, name: str) -> None:
        """Remove the files that mark a shard and the corpus as complete, before the shard is changed."""
        for path in (self.out / f"{name}.json", self.out / INDEX):
            path.unlink(missing_ok=True)

    def _write_description(self, shard: Shard) -> Shard:
        """Write a shard's description and return it. The file is written last, because it marks the shard as
        complete.
        """
        write_json(self.out / f"{shard['name']}.json", add_digest(shard))
        return shard

    def _tokens(self, tokenizer: Tokenizer, row: int) -> Iterator[Iterator[list[int]] | None]:
        """Yield the tokens of each document from `row` on, or None for a row without text. Raises
        _StopRequestedError on request.
        """
        for document in self.part.documents(self.settings["field"], row):
            if _stop_event is not None and _stop_event.is_set():
                raise _StopRequestedError
            yield None if document is None else tokenizer.stream(document)


def _stop_reason(shard: Shard) -> str:
    """Return why a shard ended: "end" (of the source), "full" (the size of a shard), or "room" (a limit on the
    whole corpus was reached)."""
    return str(shard.get("stopped", "end"))


class _StopRequestedError(Exception):
    """Raised in a worker process that was asked to stop."""


_stop_event: synchronize.Event | None = None
"""Set in worker processes only: an event that asks them to stop, because a limit is reached or another worker
failed.
"""


def _make_in_parallel(jobs: list[_Job], workers: int, remaining: RemainingLimit, done: Done | None) -> None:
    """Make shards in several processes until all sources are finished or `remaining` is used up.

    Each process reads its own source independently of the others. With a limit, some shards may turn out to
    be unneeded or too large; the sequential pass that follows corrects this.
    """
    stop_event = Event()
    existing = {job.number: list(job.existing_shards()) for job in jobs}
    waiting = deque(job for job in jobs if not _is_source_finished(existing[job.number]))
    running: dict[Future[list[Shard]], _Job] = {}
    last_check = time.monotonic()
    if not waiting or _reaches_limit(existing, remaining):
        return
    with ProcessPoolExecutor(workers, initializer=_init_worker, initargs=(stop_event, os.getpid())) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    job = waiting.popleft()
                    running[pool.submit(_make_shards, job, remaining)] = job
                for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                    existing[running.pop(future).number] = future.result()
                if time.monotonic() - last_check >= 1 or not running:
                    existing |= {job.number: list(job.existing_shards()) for job in running.values()}
                    last_check = time.monotonic()
                    if done:
                        tokens = sum(shard["tokens"] for shards in existing.values() for shard in shards)
                        done(
                            sum(_is_source_finished(shards) for shards in existing.values()),
                            len(jobs),
                            tokens,
                        )
                    if _reaches_limit(existing, remaining):
                        return
        except BrokenProcessPool:
            raise OSError(
                "--workers: a process was ended from outside, perhaps for want of memory; try fewer"
            ) from None
        finally:
            stop_event.set()
            pool.shutdown(cancel_futures=True)


def _is_source_finished(shards: list[Shard]) -> bool:
    """Whether a source was read to its end, given its shards."""
    return bool(shards) and _stop_reason(shards[-1]) == "end"


def _reaches_limit(existing: dict[int, list[Shard]], remaining: RemainingLimit) -> bool:
    """Whether the existing shards, in order up to the first gap, already use up `remaining`."""
    for number in sorted(existing):
        for shard in existing[number]:
            if shard.get("room") == list(remaining):
                return True
            remaining = remaining.after(shard)
            if remaining.used_up:
                return True
        if not _is_source_finished(existing[number]):
            return False
    return False


def _init_worker(stop_event: synchronize.Event, parent: int) -> None:
    """Initialise a worker process: store the stop event and watch the parent process."""
    global _stop_event
    _stop_event = stop_event
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has died, because a new run may write the same files."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _make_shards(job: _Job, remaining: RemainingLimit) -> list[Shard]:
    """Make the shards of one source in a worker process and return their descriptions."""
    made = []
    with suppress(_StopRequestedError):
        for shard in job.shards(remaining):
            made.append(shard)
    return made
