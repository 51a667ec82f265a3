"""Memories as chains of versions: what was committed is there after a restart or a kill, and only its owner sees it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from remanence import Model, Session, preset
from remanence.serve.database import ConflictError
from remanence.serve.memories import Memories, NotFoundError, transcript

ROOT = Path(__file__).parents[2]


def small_model():
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "vocab_size": 257, "ffn": 16}
    return Model(preset("tiny", ("mag",), memory={"heads": 2, "chunk": 4}, **sizes)).eval()


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def memories(model, tmp_path):
    found = Memories(model, tmp_path / "store")
    yield found
    found.close()


def after(model, state, text):
    session = Session(model)
    session.state = state
    session.read(text)
    return session.state


def same(one, other):
    return all(map(torch.equal, one.tensors(), other.tensors()))


def files(memories):
    return {path.stem for path in memories.files.iterdir()}


def test_a_version_is_what_was_committed_after_a_restart_too(model, memories):
    memory = memories.find_or_create("ann", "work")
    first = memories.find_version("ann", memory.head)
    assert same(memories.load(first), model.start(1))
    state = after(model, memories.load(first), "The otter swims.")
    version = memories.commit(first, state, messages=2, digest=transcript([{"role": "user", "content": "x"}]))
    assert memories.find("ann", "work").head == version.id and version.tokens == 16
    memories.close()
    again = Memories(model, memories.folder)
    found = again.find_version("ann", again.find("ann", "work").head)
    assert found == version and same(again.load(found), state)
    assert same(again.load(again.find_version("ann", first.id)), model.start(1)), (
        "the version before is there, too"
    )
    again.close()


def test_two_requests_from_one_version_cannot_both_succeed(model, memories):
    memory = memories.database.create("ann")
    first = memories.find_version("ann", memory.head)
    one = memories.commit(first, after(model, model.start(1), "one"))
    before = files(memories)
    with pytest.raises(ConflictError, match="another request"):
        memories.commit(first, after(model, model.start(1), "two"))
    assert files(memories) == before, "nothing of the second is left"
    branch = memories.commit(first, after(model, model.start(1), "three"), moves_head=False)
    assert (
        memories.find("ann", memory.id).head == one.id and memories.find_version("ann", branch.id) == branch
    )


def test_of_many_threads_each_turn_is_committed_once(model, memories):
    memory, lost = memories.database.create("ann"), []

    def turns(name):
        for _ in range(5):
            while True:
                head = memories.find_version("ann", memories.find("ann", memory.id).head)
                try:
                    memories.commit(head, after(model, memories.load(head), name))
                    break
                except ConflictError:
                    lost.append(name)

    threads = [threading.Thread(target=turns, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = memories.database.versions(memory.id)
    assert [version.tokens for version in versions] == list(range(16))
    assert files(memories) == {version.id for version in versions[1:]}


def test_only_the_owner_finds_a_memory(model, memories):
    memory = memories.find_or_create("ann", "work")
    version = memories.commit(
        memories.find_version("ann", memory.head), after(model, model.start(1), "secret")
    )
    assert memories.find_or_create("bob", "work").id != memory.id
    for call in (
        lambda: memories.find("bob", memory.id),
        lambda: memories.find_version("bob", version.id),
        lambda: memories.find_or_create("bob", memory.id),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert [each.name for each in memories.database.memories("bob")] == ["work"]


def test_fork_rollback_and_delete(model, memories):
    memory = memories.database.create("ann", "a")
    versions = [memories.find_version("ann", memory.head)]
    for text in ("one", "two", "three"):
        versions.append(memories.commit(versions[-1], after(model, memories.load(versions[-1]), text)))
    fork = memories.fork("ann", versions[1], "b")
    assert same(memories.load(memories.find_version("ann", fork.head)), memories.load(versions[1]))
    back = memories.rollback(memories.find("ann", "a"), versions[2])
    assert memories.find("ann", "a").head == back.id and same(memories.load(back), memories.load(versions[2]))
    with pytest.raises(NotFoundError, match="expected one of"):
        memories.rollback(fork, versions[1])
    with pytest.raises(ConflictError, match="name"):
        memories.fork("ann", versions[1], "b")
    memories.delete(memories.find("ann", "a"))
    assert files(memories) == {fork.head}, "every version of the deleted memory, and of no other"
    with pytest.raises(NotFoundError):
        memories.find("ann", "a")
    with pytest.raises(ConflictError, match="deleted"):
        memories.commit(versions[1], memories.load(memories.find_version("ann", fork.head)))
    assert files(memories) == {fork.head}


def test_old_versions_and_files_of_nobody_are_deleted(model, tmp_path):
    memories = Memories(model, tmp_path, keep_versions=3)
    memory = memories.database.create("ann")
    version = memories.find_version("ann", memory.head)
    for _ in range(6):
        version = memories.commit(version, after(model, model.start(1), "x"))
    known = {each.id for each in memories.database.versions(memory.id)}
    assert len(known) == 3 and version.id in known and files(memories) == known
    left = memories.files / "ver_0123.mem"
    left.write_bytes(b"")
    memories.collect_garbage()
    assert left.exists(), "a running request may still commit it"
    os.utime(left, (time.time() - 7200,) * 2)
    memories.collect_garbage()
    assert files(memories) == known
    memories.close()


def test_states_beyond_the_cache_are_read_from_their_files(model, tmp_path):
    size = model.start(1).nbytes
    memories = Memories(model, tmp_path, cache_bytes=2 * size)
    version = memories.find_version("ann", memories.database.create("ann").head)
    states = {}
    for number in range(5):
        state = after(model, model.start(1), f"{number}")
        version = memories.commit(version, state)
        states[version.id] = state
        assert memories._cached_bytes == sum(each.nbytes for each in memories._cached.values()) <= 2 * size
    for identifier, state in states.items():
        assert same(memories.load(memories.find_version("ann", identifier)), state)
    memories.close()


def test_an_uploaded_file_is_checked(model, memories, tmp_path):
    memory = memories.database.create("ann")
    session = Session(model)
    session.read("The key is under the mat.")
    session.save(tmp_path / "a.mem")
    version = memories.upload(memory, tmp_path / "a.mem")
    assert same(memories.load(version), session.state)
    (tmp_path / "b.mem").write_bytes((tmp_path / "a.mem").read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"b\.mem"):
        memories.upload(memories.find("ann", memory.id), tmp_path / "b.mem")
    assert memories.find("ann", memory.id).head == version.id


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_memories import after, small_model
from remanence.serve.memories import Memories
from pathlib import Path
model = small_model()
memories = Memories(model, Path(sys.argv[1]))
memory = memories.find_or_create("ann", "a")
version = memories.find_version("ann", memory.head)
print("ready", flush=True)
while True:
    version = memories.commit(version, after(model, memories.load(version), "x"))
    print(version.id, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "attempts", [(1, 2, 5), pytest.param(range(8), marks=pytest.mark.exhaustive)], ids=len
)
def test_kill_9_loses_no_committed_version(model, tmp_path, attempts):
    """A version that was reported is there, its file is whole, and the chain goes on from it."""
    folder, tokens = tmp_path / "store", 0
    for attempt in attempts:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        reported = [process.stdout.readline().strip()] if attempt % 2 else []
        time.sleep(0.037 * attempt)
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.read().split("\n")
        process.wait()
        memories = Memories(model, folder)
        head = memories.find_version("ann", memories.find("ann", "a").head)
        complete = [line for line in reported[:-1] if line]
        assert head.tokens >= tokens + len(complete)
        if complete:
            assert complete[-1] in (head.id, head.parent), "what was reported is the head, or just before it"
        tokens = head.tokens
        assert int(memories.load(head).position[0]) == tokens
        memories.collect_garbage(age=-1)
        known = {each.id for each in memories.database.versions(memories.find("ann", "a").id)}
        assert files(memories) == {each for each in known if memories.path(each).exists()}
        assert not tokens or head.id in files(memories)
        memories.close()
    assert tokens > 0
