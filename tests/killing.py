"""Kill a command at every system call by which it writes, take it up again, and compare what it leaves.

    python tests/killing.py FOLDER              every call of every command: minutes
    python tests/killing.py FOLDER train --some 20

A process that has imported everything forks one child for each kill and traces it (ptrace, Linux only). The child is
killed before it makes the call, so that all states are met in which a real kill, or a full disk, could leave the files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import io
import json
import os
import random
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TRACEME, SYSCALL, SETOPTIONS, SYSCALL_INFO = 0, 24, 0x4200, 0x420E
OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x100000  # mark system calls; follow forks and threads; end with the tracer
ENTRY, WALL = 1, 0x40000000
MARKED = signal.SIGTRAP | 0x80
AT_FDCWD = -100
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Number of each call, and which of its arguments are: a descriptor; a folder's descriptor and a path; flags.
X86 = {
    "write": (1, 0), "pwrite64": (18, 0), "writev": (20, 0), "ftruncate": (77, 0), "fsync": (74, 0),
    "fdatasync": (75, 0), "sendfile": (40, 0), "copy_file_range": (326, 2), "fallocate": (285, 0),
    "open": (2, None, 0, 1), "openat": (257, 0, 1, 2), "rename": (82, None, 1), "renameat": (264, 2, 3),
    "renameat2": (316, 2, 3), "mkdir": (83, None, 0), "mkdirat": (258, 0, 1), "rmdir": (84, None, 0),
    "unlink": (87, None, 0), "unlinkat": (263, 0, 1), "truncate": (76, None, 0),
}  # fmt: skip
ARM = {
    "write": (64, 0), "pwrite64": (68, 0), "writev": (66, 0), "ftruncate": (46, 0), "fsync": (82, 0),
    "fdatasync": (83, 0), "sendfile": (71, 0), "copy_file_range": (285, 2), "fallocate": (47, 0),
    "openat": (56, 0, 1, 2), "renameat": (38, 2, 3), "renameat2": (276, 2, 3), "mkdirat": (34, 0, 1),
    "unlinkat": (35, 0, 1), "truncate": (45, None, 0),
}  # fmt: skip
CALLS = {
    number: (name, where)
    for name, (number, *where) in (ARM if os.uname().machine == "aarch64" else X86).items()
}
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long] * 2 + [ctypes.c_void_p] * 2
LIBC.ptrace.restype = ctypes.c_long


class Call(NamedTuple):
    """A system call that changes files, and the path that it changes."""

    name: str
    path: str


def ptrace(request: int, pid: int = 0, address: int = 0, data: int = 0) -> None:
    if LIBC.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request}: {os.strerror(ctypes.get_errno())}")


def entered(pid: int, folder: str) -> Call | None:
    """The call that a stopped thread is about to make, if it writes inside a folder."""
    info = ctypes.create_string_buffer(88)
    if LIBC.ptrace(SYSCALL_INFO, pid, len(info), ctypes.addressof(info)) < 0 or info.raw[0] != ENTRY:
        return None
    number, *arguments = struct.unpack_from("<7Q", info.raw, 24)
    if number not in CALLS:
        return None
    name, where = CALLS[number]
    if len(where) == 1:
        path = descriptor(pid, arguments[where[0]])
    else:
        if len(where) == 3 and not arguments[where[2]] & WRITES:
            return None
        path = text(pid, arguments[where[1]])
        base = None if where[0] is None else ctypes.c_int32(arguments[where[0]]).value
        if not path.startswith("/") and base not in (None, AT_FDCWD):
            path = f"{descriptor(pid, base)}/{path}"
    return Call(name, path) if path.startswith(folder) else None


def descriptor(pid: int, number: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def text(pid: int, address: int) -> str:
    """A string in another process's memory."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(address)
        found = b""
        while b"\0" not in found:
            # Not past the end of a page, which may be the last one that is mapped.
            found += memory.read(min(4096 - (address + len(found)) % 4096, 256))
    return os.fsdecode(found.partition(b"\0")[0])


def traced(act: Callable[[], None], folder: Path, kill_at: int | None = None) -> tuple[list[Call], int]:
    """Run `act` in a child, killed before its n-th write; the writes that it came to, and its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ptrace(TRACEME)
            os.kill(os.getpid(), signal.SIGSTOP)
            act()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    ptrace(SETOPTIONS, child, 0, OPTIONS)
    ptrace(SYSCALL, child)
    calls: list[Call] = []
    while True:
        pid, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if pid == child:
                return calls, os.waitstatus_to_exitcode(status)
            continue
        stop, passed_on = os.WSTOPSIG(status), 0
        if stop == MARKED:
            call = entered(pid, str(folder))
            if call is not None:
                calls.append(call)
                if len(calls) == kill_at:
                    os.kill(child, signal.SIGKILL)
                    continue
        elif stop not in (signal.SIGSTOP, signal.SIGTRAP):
            passed_on = stop
        with contextlib.suppress(ProcessLookupError):
            ptrace(SYSCALL, pid, 0, passed_on)


def command(*arguments: object) -> None:
    """As the command line does it, in silence."""
    from remanence.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main([str(each) for each in arguments])
        except SystemExit as ended:
            if ended.code:
                raise ValueError(errors.getvalue()) from None


def train(given: Path, out: Path) -> None:
    from remanence.train import fit

    again = (out / "run" / "config.json").exists()
    config = None if again else training(given)
    fit(config, out / "run", resume=again)


def training(given: Path):
    from runs import config

    from remanence.train import DataConfig

    data = DataConfig(kind="documents", path=str(given / "data"), length=16)
    return config("mac", data=data, carry=True, batch=2, steps=4, save_every=2, keep=1)


def read(given: Path, out: Path) -> None:
    again = ["--resume"] if (out / "book.mem").exists() else []
    command("read", given / "model", given / "a.txt", "--save", out / "book.mem", *again)


def prepare(given: Path, out: Path) -> None:
    command("data", "prepare", given / "a.txt", given / "b.txt", "--out", out / "data")


def evaluate(given: Path, out: Path) -> None:
    task = [
        "lm",
        f"--lm.data={given / 'a.txt'}",
        "--lm.max_tokens=256",
        "--lm.rows=1",
        "--json",
        out / "rows.json",
    ]
    command("eval", given / "model", *task)


def chat(given: Path, out: Path) -> None:
    """A chat that is taken up again with the messages whose answers are not in the memory."""
    from remanence.inference import memfile

    messages, memory = ["Hello there.", "How are you today?", "Good night."], out / "chat.mem"
    left = memfile.read_file(memory)[0]["tokens"][0] if memory.exists() else 0
    while left > 0:
        left -= len(f"\n{messages.pop(0)}") + ANSWER
    sys.stdin = io.StringIO("".join(f"{message}\n" for message in messages))
    options = ("--memory-file", memory, "--max-tokens", ANSWER, "--temperature", 0, "--device", "cpu")
    command("chat", given / "model", *options)


def serve(given: Path, out: Path) -> None:
    """A server, and a client that notes each answer. A server that is started again has what was answered."""
    import httpx

    from remanence import Session
    from remanence.serve.server import Server, Settings, address, listen

    noted = out / ANSWERED
    known = [json.loads(line) for line in documents(noted)] if noted.exists() else []
    out.joinpath("store").mkdir(exist_ok=True)
    settings = Settings(name="model", folder=out / "store", keep_versions=32)
    with listen("127.0.0.1", 0) as listener, Server(Session(given / "model"), settings) as server:
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        try:
            talk(httpx.Client(base_url=address(listener), timeout=60, trust_env=False), noted, known)
        finally:
            server.stop()
            thread.join()
        memories = server.memories
        memories.collect_garbage(age=-1)
        head = memories.head(memories.find("local", "ann"))
        left = memories.store.names()
        expected = {version.id for version in memories.database.versions(head.memory) if version.bytes}
        if left != expected or memories.load(head).tokens != head.tokens:
            raise ValueError(f"expected the files {expected}, got {left}")


def talk(http, noted: Path, known: list[dict]) -> None:
    """Check that all known answers are in the memory, and ask for the others, each with the whole conversation."""
    if known:
        versions = {
            each["id"]: each["parent"] for each in http.get("/v1/memories/ann/versions").json()["data"]
        }
        chain, place = [], http.get("/v1/memories/ann").json()["version"]
        while place in versions:
            chain.append(place)
            place = versions[place]
        if not {each["version"] for each in known} <= set(chain):
            raise ValueError(f"expected the versions {known}, got {chain}")
    for number in range(len(known), ANSWERS):
        messages = []
        for each in known:
            messages += [{"role": "user", "content": each["message"]}]
            messages += [{"role": "assistant", "content": each["text"]}]
        message = f"This is message {number}."
        body = {"model": "model", "user": "ann", "max_tokens": ANSWER, "temperature": 0}
        body["messages"] = [*messages, {"role": "user", "content": message}]
        headers = {"Idempotency-Key": f"message {number}"}
        done = http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
        text, tokens = done.json()["choices"][0]["message"]["content"], done.json()["usage"]["total_tokens"]
        version = done.headers["X-Memory-Version"]
        known.append({"version": version, "message": message, "text": text, "tokens": tokens})
        with open(noted, "a") as file:
            file.write(json.dumps(known[-1]) + "\n")
    read, expected = http.get("/v1/memories/ann").json()["tokens"], sum(each["tokens"] for each in known)
    if read != expected:
        raise ValueError(f"expected each message to be read once, {expected} tokens, got {read}")


ANSWER = 5
"""Number of tokens in each answer of a chat."""
ANSWERED, ANSWERS = "answered.jsonl", 3
"""The file in which the client of a server notes its answers, and their number."""
COMMANDS = {"train": train, "read": read, "prepare": prepare, "eval": evaluate, "chat": chat, "serve": serve}
CHANGING = ("date", "commit", "tokens_per_s", "memory_gib", "hours")
"""Entries of JSON files that differ from run to run."""


def outcome(folder: Path) -> dict[str, str]:
    """Every file that is left, leftovers of the killed included, by the digest of what it says. Of a server, whose
    identifiers are random, the number of answers.
    """
    if (noted := folder / ANSWERED).exists():
        return {ANSWERED: str(len(documents(noted)))}
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.suffix != ".png":
            data = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                data = json.dumps([plain(json.loads(line)) for line in documents(path)]).encode()
            elif path.suffix in (".mem", ".safetensors"):  # whose header has no order
                length = 8 + int.from_bytes(data[:8], "little")
                data = json.dumps(json.loads(data[8:length]), sort_keys=True).encode() + data[length:]
            found[name] = hashlib.sha256(data).hexdigest()
        elif path.is_dir() and path.name.startswith("."):
            found[name] = "left"
    return found


def documents(path: Path) -> list[str]:
    told = path.read_text(encoding="utf-8")
    return told.splitlines() if path.suffix == ".jsonl" else [told]


def plain(node):
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items() if key not in (*CHANGING, "digest")}
    return [plain(each) for each in node] if isinstance(node, list) else node


def setup(folder: Path) -> None:
    """What the commands are given: two texts, a corpus of them, a model."""
    from models import model

    from remanence.data import prepare as prepared
    from remanence.tokenizers.tokens import ByteTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "a.txt").write_text("It was the best of times, it was the worst of times. " * 30)
    (folder / "b.txt").write_text("Call me Ishmael. Some years ago, never mind how long. " * 20)
    prepared([folder / "a.txt", folder / "b.txt"], folder / "data")
    import torch

    model("mac", torch.float32, vocab_size=257).save(folder / "model")
    ByteTokenizer().save(folder / "model")


def flushed(calls: list[Call]) -> list[str]:
    """What a loss of power could undo: a name that was given to a file or folder, and not flushed with its folder."""
    missing = []
    for index, call in enumerate(calls):
        if call.name.startswith("rename") and ".tmp" not in call.path:
            place = str(Path(call.path).parent)
            if not any(later == Call("fsync", place) for later in calls[index:]):
                missing.append(call.path)
    return missing


def kill_all(
    name: str, given: Path, folder: Path, some: int | None = None, at: list[int] | None = None, seed: int = 0
) -> dict[str, object]:
    """One command, killed at all of its writes, at some of them or at those given, and taken up again."""
    act, whole = COMMANDS[name], folder / "whole"
    shutil.rmtree(folder, ignore_errors=True)
    whole.mkdir(parents=True)
    calls, status = traced(lambda: act(given, whole), whole)
    if status:
        raise ValueError(f"{name}: ended with {status}")
    wanted = outcome(whole)
    moments = at or list(range(1, len(calls) + 1))
    moments = sorted(random.Random(seed).sample(moments, min(some, len(moments)))) if some else moments
    failed = {}
    out = folder / "killed"
    for moment in moments:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        reached, ended = traced(lambda: act(given, out), out, moment)
        status = traced(lambda: act(given, out), out)[1] if ended == -signal.SIGKILL else ended
        left = {key: outcome(out).get(key) for key in {*wanted, *outcome(out)}} if status == 0 else {}
        differing = sorted(key for key in {*wanted, *left} if wanted.get(key) != left.get(key))
        if ended != -signal.SIGKILL or status or differing:
            failed[moment] = [str(reached[-1:]), status, *differing]
    return {
        "command": name,
        "writes": len(calls),
        "kills": len(moments),
        "identical": len(moments) - len(failed),
        "not flushed": flushed(calls),
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("commands", nargs="*", default=list(COMMANDS))
    parser.add_argument("--some", type=int, help="of each command's writes, so many drawn by chance")
    parser.add_argument("--at", type=int, nargs="+", help="only these writes, counted from 1")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here / "train")]
    os.environ |= {"REMANENCE_AUTOSAVE": "0", "OMP_NUM_THREADS": "1"}
    # All that the commands import, so that the children do not.
    import matplotlib as mpl

    mpl.use("Agg")
    import httpx  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo
    import torch.optim

    import remanence.cli
    import remanence.evaluate
    import remanence.serve.server
    import remanence.train  # noqa: F401

    torch.set_num_threads(1)
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (
        os.fork() == 0
    ):  # a process that has computed something may not be forked: its threads would be missing
        setup(folder / "given")
        os._exit(0)
    if os.wait()[1]:
        sys.exit("the setup failed")
    for name in given.commands:
        place = folder / name
        found = kill_all(name, folder / "given", place, given.some, given.at, given.seed)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
