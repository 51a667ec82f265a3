"""Files of versions at a URL: only whole files are read, deletion is verified, and errors say what is wrong."""

import sys

import pytest
from serving import GREEDY, MODEL, chat_session, running, user
from stored import after, scratch, small_model

from remanence.serve.memories import Memories
from remanence.serve.store import FolderStore, StoreError, UrlStore, open_store


@pytest.fixture
def memories(tmp_path):
    store = UrlStore(f"file://{tmp_path / 'files'}", scratch(tmp_path))
    found = Memories(small_model(), tmp_path, cache_bytes=0, store=store)
    yield found
    found.close()


def committed(memories):
    """A memory that has read something, its version and the path of its file."""
    memory = memories.database.create("ann")
    version = memories.commit(memories.head(memory), after(memories.new_session(), "x"))
    return memory, version, memories.folder / "files" / f"{version.id}.mem"


def test_a_file_that_is_not_whole_is_not_read(memories):
    """Neither one that is shorter nor one with a byte that differs."""
    _, version, path = committed(memories)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        StoreError, match=f"expected {len(whole):,} bytes of {version.id}, got {len(whole) - 1:,}"
    ):
        memories.load(version)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match="altered or damaged"):
        memories.load(version)
    path.unlink()
    with pytest.raises(StoreError, match="FileNotFoundError"):
        memories.load(version)
    path.write_bytes(whole)
    assert memories.load(version).tokens == version.tokens


def test_a_version_whose_file_is_not_written_whole_is_not_committed(memories, monkeypatch):
    memory, version, _ = committed(memories)
    system = memories.store._system

    def half(path, key):
        with open(path, "rb") as file, system.open(key, "wb") as target:
            target.write(file.read()[:100])

    def fails(path, key):
        half(path, key)
        raise ConnectionResetError("of the store")

    for put, message in ((half, "expected .* bytes"), (fails, "ConnectionResetError")):
        with monkeypatch.context() as patch:
            patch.setattr(type(system), "put_file", staticmethod(put))
            with pytest.raises(StoreError, match=message):
                memories.commit(version, after(memories.load(version), "y"))
        assert memories.find("ann", memory.id).head == version.id
    memories.collect_garbage(age=-1)
    assert memories.store.names() == {version.id}


def test_a_deletion_that_left_a_file_is_an_error_and_can_be_repeated(memories, monkeypatch):
    memory, version, path = committed(memories)
    system = memories.store._system
    with monkeypatch.context() as patch:
        patch.setattr(type(system), "rm_file", lambda *_: None)
        with pytest.raises(StoreError, match=f"expected the file of {version.id} to be deleted"):
            memories.delete(memory)
    assert path.exists()
    memories.delete(memories.find("ann", memory.id))
    assert not path.exists() and not memories.database.memories("ann")


def test_a_server_keeps_files_at_a_url(tmp_path):
    """Answers, downloads, uploads and deletion work, with no memory in RAM."""
    url, folder = "memory://served", tmp_path / "a"
    started = running(chat_session(tmp_path / "model"), folder, store=url, cache_bytes=0)
    with started as served, served.http() as http:
        body = {"model": MODEL, "user": "ann", "messages": [user("My dog is Rex.")], **GREEDY}
        http.post("/v1/chat/completions", json=body).raise_for_status()
        content = http.get("/v1/memories/ann/content").raise_for_status().content
        assert not (folder / "versions").exists() and len(served.memories.store.names()) == 1
        shown = http.put("/v1/memories/copy/content", content=content).raise_for_status().json()
        assert shown["bytes"] == len(http.get("/v1/memories/copy/content").content)
        sentences = [http.get(f"/v1/memories/{name}/sentences").json()["data"] for name in ("ann", "copy")]
        assert sentences[0] == sentences[1] != []
        http.post("/v1/chat/completions", json={**body, "user": "copy"}).raise_for_status()
        system = served.memories.store._system
        for name in ("ann", "copy"):
            http.delete(f"/v1/memories/{name}").raise_for_status()
        assert not system.find("served")
        served.wait_until_idle()
        assert not list(served.memories.uploads.iterdir()), "no copy is left"


def test_a_url_of_this_machine_is_a_folder(tmp_path):
    for place in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        store = open_store(place, tmp_path)
        assert isinstance(store, FolderStore) and store.folder == tmp_path / "a b"


def test_errors_of_places(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place, message in (
        (str(tmp_path / "file" / "x"), "--store: expected a folder that can be made, got"),
        ("nothing://key:secret@x", "--store: expected a URL that can be opened, got one of nothing://"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            open_store(place, tmp_path)
        assert "secret" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match=r"--store needs the extra 'store': pip install 'remanence\[store\]'"
    ):
        open_store("memory://x", tmp_path)
