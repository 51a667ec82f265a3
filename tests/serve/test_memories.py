"""Memories as chains of versions: what was committed is there after a restart or a kill, and only its owner sees it."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from postgres import cluster, emptied
from sentence_models import chat_folder, message
from stored import after, opened, scratch, small_model

from remanence import Session
from remanence.attached.folder import load_model
from remanence.serve.database import ConflictError, Database
from remanence.serve.memories import Memories, NotFoundError, transcripts
from remanence.serve.store import UrlStore

SAID = {"role": "user", "content": "x"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def postgres():
    """The URL of a PostgreSQL that is started for these tests, or None where there is none."""
    with cluster() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow), "memory://", "file://"])
def memories(request, model, tmp_path):
    """Of each database and each store."""
    database = store = None
    if request.param == "postgres":
        if (url := request.getfixturevalue("postgres")) is None:
            pytest.skip("there is no PostgreSQL here")
        database = emptied(url)
    elif "://" in request.param:
        store = UrlStore(f"{request.param}{tmp_path / 'files'}", scratch(tmp_path / "store"))
    found = Memories(model, tmp_path / "store", keep_versions=32, database=database, store=store)
    yield found
    assert not list(found.uploads.iterdir()), "no copy is left"
    found.close()


def same(one, other):
    return all(map(torch.equal, one.state.tensors(), other.state.tensors()))


def files(memories):
    return memories.store.names()


def test_a_version_is_what_was_committed_after_a_restart_too(model, memories):
    memory = memories.find_or_create("ann", "work")
    first = memories.find_version("ann", memory.head)
    assert same(memories.load(first), Session(model))
    state = after(memories.load(first), "The otter swims.")
    version = memories.commit(first, state, messages=2, digest=transcripts([SAID])[-1])
    assert memories.find("ann", "work").head == version.id and version.tokens == 16
    memories.close()
    url, kind = getattr(memories.database, "url", None), type(memories.database)
    database = None if url is None else kind(url)
    again = Memories(model, memories.folder, database=database, store=memories.store)
    found = again.find_version("ann", again.find("ann", "work").head)
    assert found == version and same(again.load(found), state)
    assert same(again.load(again.find_version("ann", first.id)), Session(model)), (
        "the version before is there, too"
    )
    again.close()


def test_a_new_database_waits_for_another_process_that_creates_it(tmp_path):
    other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE x (y)")
    threading.Timer(0.3, lambda: (other.execute("COMMIT"), other.close())).start()
    database = Database(tmp_path / "a.sqlite")
    assert database._rows("PRAGMA journal_mode") == [("wal",)] and database.memories("ann") == []
    database.close()


def test_two_requests_from_one_version_cannot_both_succeed(model, memories):
    memory = memories.database.create("ann")
    first = memories.find_version("ann", memory.head)
    one = memories.commit(first, after(memories.new_session(), "one"))
    before = files(memories)
    with pytest.raises(ConflictError, match="another request"):
        memories.commit(first, after(memories.new_session(), "two"))
    assert files(memories) == before, "nothing of the second is left"
    branch = memories.commit(first, after(memories.new_session(), "three"), moves_head=False)
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
                    memories.commit(head, after(memories.load(head), name))
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
        memories.find_version("ann", memory.head), after(memories.new_session(), "secret")
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
        versions.append(memories.commit(versions[-1], after(memories.load(versions[-1]), text)))
    fork = memories.fork("ann", versions[1], "b")
    assert same(memories.load(memories.find_version("ann", fork.head)), memories.load(versions[1]))
    memories.rollback(memories.find("ann", "a"), versions[2])
    assert memories.find("ann", "a").head == versions[2].id
    other = memories.commit(versions[2], after(memories.load(versions[2]), "four"))
    assert [each.id for each in memories.chain(other)] == [
        each.id for each in (other, versions[2], versions[1], versions[0])
    ]
    with pytest.raises(ConflictError, match="another request"):
        memories.database.move_head(memory.id, versions[2].id, versions[1].id)
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
        version = memories.commit(version, after(memories.new_session(), "x"))
    known = {each.id for each in memories.database.versions(memory.id)}
    assert len(known) == 3 and version.id in known and files(memories) == known
    left = memories.store.path("ver_0123")
    other = UrlStore(f"file://{left.parent}", memories.uploads)
    for store in (memories.store, other):
        memories.store = store
        left.write_bytes(b"")
        memories.collect_garbage()
        assert left.exists(), "a running request may still commit it"
        os.utime(left, (time.time() - 7200,) * 2)
        memories.collect_garbage()
        assert files(memories) == known
    memories.close()


def test_states_beyond_the_cache_are_read_from_their_files(model, tmp_path):
    size = Session(model).state.nbytes
    memories = Memories(model, tmp_path, cache_bytes=2 * size)
    version = memories.find_version("ann", memories.database.create("ann").head)
    states = {}
    for number in range(5):
        state = after(memories.new_session(), f"{number}")
        version = memories.commit(version, state)
        states[version.id] = state
        assert (
            memories._cached_bytes == sum(each.state.nbytes for each in memories._cached.values()) <= 2 * size
        )
    for identifier, state in states.items():
        assert same(memories.load(memories.find_version("ann", identifier)), state)
    memories.close()


def test_an_uploaded_file_is_checked(model, memories, tmp_path):
    memory = memories.database.create("ann")
    session = Session(model)
    session.read("The key is under the mat.")
    session.save(tmp_path / "a.mem")
    version = memories.upload(memory, memories.open_upload(tmp_path / "a.mem"))
    assert same(memories.load(version), session)
    (tmp_path / "b.mem").write_bytes((tmp_path / "a.mem").read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"^file: "):
        memories.open_upload(tmp_path / "b.mem")
    assert memories.find("ann", memory.id).head == version.id


def test_messages_that_were_read_are_known_by_their_digests(memories):
    """Of several conversations with one memory; spaces around a message do not count."""
    one = [{"role": "user", "content": str(n)} for n in range(4)]
    other = [{"role": "user", "content": f"other {n}"} for n in range(3)]
    memory = memories.database.create("ann")
    version = memories.head(memory)
    for read in (one[:2], other[:2], one[:3]):
        digest = transcripts(read)[-1]
        version = memories.commit(version, memories.load(version), messages=len(read), digest=digest)
    spaced = [{**each, "content": f" {each['content']}\n"} for each in one]
    assert memories.num_read(version, transcripts(spaced)) == 3
    assert memories.num_read(version, transcripts(other)) == 2
    assert memories.num_read(version, transcripts(other[1:])) == 0
    assert transcripts(one)[3] == transcripts(one[3:], transcripts(one)[2])[0]
    memories.rollback(memories.find("ann", memory.id), next(iter([*memories.chain(version)][1:])))
    assert memories.num_read(memories.head(memories.find("ann", memory.id)), transcripts(one)) == 2


def test_a_forgotten_sentence_is_in_no_file(tmp_path):
    """Nor in that of an earlier version or a branch; a request that is still under way cannot bring it back."""
    with torch.device("cpu"):
        model = load_model(chat_folder(tmp_path / "model")).eval()
    memories = Memories(model, tmp_path / "store")
    memory = memories.database.create("ann")
    version = memories.head(memory)
    texts = [message("The code is 4711. The dog is called Rex."), "\x06\n" + message("A letter came.")]
    for text in texts:
        session = memories.load(version)
        session.generate(text, max_tokens=4)
        version = memories.commit(version, session, messages=2, digest="d")
    late = after(memories.load(version), "more")
    branch = memories.commit(version, after(memories.load(version), "x"), moves_head=False)
    removed = memories.forget(memories.find("ann", memory.id), "code")
    assert [each.text for each in removed] == ["The code is 4711."]
    head = memories.head(memories.find("ann", memory.id))
    assert [each.text for each in memories.load(head).sentences()] == [
        "The dog is called Rex.",
        "A letter came.",
    ]
    assert files(memories) == {head.id} and (head.messages, head.transcript) == (2, "d")
    for moves in (True, False):
        with pytest.raises(ConflictError):
            memories.commit(version, late, moves_head=moves)
    with pytest.raises(NotFoundError):
        memories.find_version("ann", branch.id)
    memories.close()


WRITER = """
import sys
from stored import opened, small_model
from pathlib import Path
memories = opened(small_model(), Path(sys.argv[1]), sys.argv[2])
memory = memories.find_or_create("ann", "a")
version = memories.find_version("ann", memory.head)
print("ready", flush=True)
while True:
    session = memories.load(version)
    session.read("x")
    version = memories.commit(version, session)
    print(version.id, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "file://"])
@pytest.mark.parametrize(
    "attempts", [(1, 2, 5), pytest.param(range(8), marks=pytest.mark.exhaustive)], ids=len
)
def test_kill_9_loses_no_committed_version(model, tmp_path, attempts, kind):
    """A version that was reported is there, its file is whole, and the chain goes on from it."""
    folder, tokens = tmp_path / "store", 0
    for attempt in attempts:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), kind],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        reported = [process.stdout.readline().strip()] if attempt % 2 else []
        time.sleep(0.037 * attempt)
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.read().split("\n")
        process.wait()
        memories = opened(model, folder, kind)
        head = memories.find_version("ann", memories.find("ann", "a").head)
        complete = [line for line in reported[:-1] if line]
        assert head.tokens >= tokens + len(complete)
        if complete:
            assert complete[-1] in (head.id, head.parent), "what was reported is the head, or just before it"
        tokens = head.tokens
        assert memories.load(head).tokens == tokens
        memories.collect_garbage(age=-1)
        known = {each.id for each in memories.database.versions(memories.find("ann", "a").id)}
        assert files(memories) <= known and (not tokens or head.id in files(memories))
        assert all(memories.load(each).tokens == each.tokens for each in memories.chain(head))
        memories.close()
    assert tokens > 0
