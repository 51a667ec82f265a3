"""From texts to token shards: in parallel, one shard per file, and what is done already is not done again."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from remanence.data.shards import dtype_for, write_index, write_shard
from remanence.data.sources import documents, files
from remanence.files import read_json, write_json
from remanence.tokens import ByteTokenizer, Tokenizer, read_tokenizer


def prepare(
    sources: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    field: str = "text",
    workers: int = 1,
    done: Any = None,
) -> dict[str, int]:
    """Write every document of the sources to `out` as tokens, each followed by the tokenizer's end mark.

    Started again after an interruption it goes on: a file whose shard is there, made from the same size and time of change, is
    passed over. `done(bytes)` is called as files are finished.
    """
    out = Path(out)
    found = files([Path(source) for source in sources])
    own = _tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    own.save(out)
    jobs = [(path, out, f"{number:05d}", tokenizer, field) for number, path in enumerate(found)]
    shards: dict[str, dict[str, Any]] = {}
    waiting = []
    for job in jobs:
        if (made := _made(job)) is not None:
            shards[job[2]] = made
            if done:
                done(job[0].stat().st_size)
        else:
            waiting.append(job)
    if workers == 1:
        for job in waiting:
            shards[job[2]] = _shard(*job)
            if done:
                done(job[0].stat().st_size)
    elif waiting:
        with ProcessPoolExecutor(min(workers, len(waiting))) as pool:
            running = {pool.submit(_shard, *job): job for job in waiting}
            for future in as_completed(running):
                shards[running[future][2]] = future.result()
                if done:
                    done(running[future][0].stat().st_size)
    listed = [shards[name] for name in sorted(shards)]
    write_index(out, [{key: shard[key] for key in ("name", "tokens", "documents")} for shard in listed], own.vocabulary)
    return {"files": len(listed), **{key: sum(shard[key] for shard in listed) for key in ("documents", "tokens")}}


def _tokenizer(path: str | Path | None) -> Tokenizer:
    return ByteTokenizer() if path is None else read_tokenizer(Path(path))


def _made_from(path: Path, tokenizer: str | Path | None, field: str) -> dict[str, Any]:
    """What a shard depends on, as far as can be seen without reading."""
    stat = path.stat()
    made = {"source": path.name, "size": stat.st_size, "changed": stat.st_mtime_ns, "field": field}
    return {**made, "tokenizer": None if tokenizer is None else Path(tokenizer).stat().st_size}


def _made(job: tuple[Path, Path, str, str | Path | None, str]) -> dict[str, Any] | None:
    """The shard of a job, if it is there already."""
    path, out, name, tokenizer, field = job
    note = out / f"{name}.json"
    if not note.is_file():
        return None
    shard = read_json(note)
    return shard if shard.get("from") == _made_from(path, tokenizer, field) else None


def _shard(path: Path, out: Path, name: str, tokenizer: str | Path | None, field: str) -> dict[str, Any]:
    own = _tokenizer(tokenizer)
    dtype = dtype_for(own.vocabulary)
    end = [] if own.end is None else [own.end]
    made = []
    for text in documents(path, field):
        tokens = [token for piece in own.stream([text]) for token in piece]
        if tokens:
            made.append(np.array(tokens + end, dtype))
    shard = {**write_shard(out, name, made, dtype), "from": _made_from(path, tokenizer, field)}
    write_json(out / f"{name}.json", shard)  # last: it says that the shard is whole
    return shard
