"""Memories over HTTP: created, listed, moved between servers, forked, rolled back, forgotten and deleted."""

import pytest
import torch
from serving import GREEDY, MODEL, chat_session, running, user

from remanence import Session

FACTS = ["My dog is called Rex.", "The code of the gate is 4711."]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return chat_session(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(session, tmp_path_factory):
    with running(session, tmp_path_factory.mktemp("data")) as found:
        yield found


@pytest.fixture
def http(served):
    with served.http() as client:
        yield client


@pytest.fixture
def name(request):
    return request.node.name[:200]


def tell(http, name, text=FACTS[0], status=200, **settings):
    body = {"model": MODEL, "user": name, "messages": [user(text)], **GREEDY, **settings}
    done = http.post("/v1/chat/completions", json=body)
    assert done.status_code == status, done.text
    return done


def sentences(http, name, **query):
    done = http.get(f"/v1/memories/{name}/sentences", params=query)
    assert done.status_code == 200, done.text
    return [each["text"] for each in done.json()["data"]]


def versions(http, name):
    return http.get(f"/v1/memories/{name}/versions").json()["data"]


def same(one, other):
    return all(map(torch.equal, one.state.tensors(), other.state.tensors()))


def test_a_memory_is_created_listed_and_shown(http, name):
    created = http.post("/v1/memories", json={"name": name})
    assert created.status_code == 201 and created.json()["tokens"] == created.json()["bytes"] == 0
    assert http.post("/v1/memories", json={"name": name}).status_code == 409
    tell(http, name)
    shown = http.get(f"/v1/memories/{name}").json()
    assert shown == http.get(f"/v1/memories/{created.json()['id']}").json()
    assert shown in http.get("/v1/memories").json()["data"]
    assert shown["tokens"] > 20 and shown["bytes"] > 1000 and shown["version"] != created.json()["version"]
    assert http.post("/v1/memories").json()["name"] is None, "a memory needs no name"
    version = tell(http, created.json()["id"]).headers["X-Memory-Version"]
    assert version == http.get(f"/v1/memories/{name}").json()["version"]


def test_sentences_are_listed_and_searched(http, name):
    for text in FACTS:
        tell(http, name, text)
    assert sentences(http, name) == FACTS and sentences(http, name, limit=1) == FACTS[1:]
    found = http.get(f"/v1/memories/{name}/sentences", params={"query": FACTS[0]}).json()
    assert found["total"] == 2 and found["data"][0]["similarity"] >= found["data"][1]["similarity"]
    assert all(each["written_at"] > 1.7e9 for each in found["data"])
    assert http.get(f"/v1/memories/{name}/sentences", params={"limit": 0}).status_code == 400


def test_a_memory_moves_to_another_server_and_to_the_command_line(http, name, session, tmp_path):
    tell(http, name)
    content = http.get(f"/v1/memories/{name}/content")
    assert content.headers["content-type"] == "application/octet-stream"
    (tmp_path / "a.mem").write_bytes(content.content)
    own = Session(session.model, session.tokenizer).load(tmp_path / "a.mem")
    assert [each.text for each in own.sentences()] == FACTS[:1]
    with running(session, tmp_path / "other") as other, other.http() as there:
        put = there.put("/v1/memories/mine/content", content=content.content)
        assert put.status_code == 200 and put.json()["name"] == "mine", put.text
        assert same(other.memories.load(other.memories.head(other.memories.find("local", "mine"))), own)
        here = tell(http, name, FACTS[1]).json()["choices"]
        assert tell(there, "mine", FACTS[1]).json()["choices"] == here, "both continue alike"


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other"])
def test_a_damaged_upload_is_refused_and_changes_nothing(http, name, served, damage):
    tell(http, name)
    before, content = (
        http.get(f"/v1/memories/{name}").json(),
        http.get(f"/v1/memories/{name}/content").content,
    )
    bad = {
        "empty": b"", "cut": content[:-9], "changed": content[:-50] + bytes([content[-50] ^ 255]) + content[-49:],
        "other": b"cos\nsystem\n(S'false'\ntR." * 20,
    }[damage]  # fmt: skip
    done = http.put(f"/v1/memories/{name}/content", content=bad)
    assert done.status_code == 400 and done.json()["error"]["message"].startswith("file: "), done.text
    assert str(served.memories.folder) not in done.text
    assert http.put(f"/v1/memories/{name}-new/content", content=bad).status_code == 400
    assert http.get(f"/v1/memories/{name}-new").status_code == 404
    assert http.get(f"/v1/memories/{name}").json() == before
    assert not list(served.memories.uploads.iterdir()), "the file is not kept"


def test_after_an_upload_a_conversation_is_read_again(http, name):
    """The messages that the memory had read are not in the uploaded one."""
    tell(http, name)
    content = http.get(f"/v1/memories/{name}/content").content
    tell(http, name, FACTS[1])
    http.put(f"/v1/memories/{name}/content", content=content)
    assert sentences(http, name) == FACTS[:1]
    tell(http, name, FACTS[1])
    assert sentences(http, name) == FACTS


def test_fork_and_rollback(http, name):
    tell(http, name)
    first = http.get(f"/v1/memories/{name}").json()["version"]
    tell(http, name, FACTS[1])
    fork = http.post(f"/v1/memories/{name}/fork", json={"name": f"{name}-b", "version": first})
    assert fork.status_code == 201 and sentences(http, f"{name}-b") == FACTS[:1]
    whole = http.post(f"/v1/memories/{name}/fork").json()
    assert sentences(http, whole["id"]) == FACTS and whole["name"] is None
    assert http.post(f"/v1/memories/{name}/fork", json={"version": whole["version"]}).status_code == 404
    back = http.post(f"/v1/memories/{name}/rollback", json={"version": first})
    assert back.json()["version"] == first and sentences(http, name) == FACTS[:1]
    assert [each["is_newest"] for each in versions(http, name)] == [False, True, False]
    tell(http, name, "A letter came.")
    assert sentences(http, name) == [FACTS[0], "A letter came."]
    assert http.post(f"/v1/memories/{name}/rollback", json={"version": "ver_0"}).status_code == 404


def test_forgetting_removes_a_fact_from_every_version(http, name, served):
    door = "The code of the door is 12."
    for text in (*FACTS, door):
        tell(http, name, text)
    old = http.get(f"/v1/memories/{name}").json()["version"]
    several = http.post(f"/v1/memories/{name}/forget", json={"text": "code"})
    assert several.status_code == 400 and "which fits 2" in several.json()["error"]["message"]
    assert http.get(f"/v1/memories/{name}").json()["version"] == old
    done = http.post(f"/v1/memories/{name}/forget", json={"text": "gate"})
    assert [each["text"] for each in done.json()["data"]] == [FACTS[1]]
    assert sentences(http, name) == [FACTS[0], door] and len(versions(http, name)) == 1
    assert http.get(f"/v1/memories/{name}/content", params={"version": old}).status_code == 404
    tell(http, name, "Good night.")
    assert sentences(http, name) == [FACTS[0], door, "Good night."]


def test_a_text_is_read_without_an_answer(http, name):
    done = http.post(f"/v1/memories/{name}/read", json={"text": " ".join(FACTS) + " The end is here"})
    assert done.status_code == 200, done.text
    assert [each.strip() for each in sentences(http, name)] == FACTS
    tell(http, name, "x?")
    assert len(sentences(http, name)) == 4


def test_a_deleted_memory_is_not_in_the_store(http, name, served):
    for text in FACTS:
        tell(http, name, text)
    identifier = http.get(f"/v1/memories/{name}").json()["id"]
    own = [each["id"] for each in versions(http, name)]
    gone = {"id": identifier, "object": "memory.deleted", "deleted": True}
    assert http.delete(f"/v1/memories/{name}").json() == gone
    assert http.delete(f"/v1/memories/{name}").status_code == 404
    left = [path for path in served.memories.folder.rglob("*") if path.is_file()]
    assert left and not [path for path in left if any(each in path.name for each in own)]
    for path in left:
        data = path.read_bytes()
        assert not [each for each in [name, identifier, *own] if each.encode() in data], path
    tell(http, name)
    assert sentences(http, name) == FACTS[:1], "a new memory of the same name is empty before"


@pytest.mark.parametrize(
    ("method", "path", "json"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("GET", "/versions", None),
        ("GET", "/sentences", None),
        ("GET", "/content", None),
        ("POST", "/fork", {}),
        ("POST", "/rollback", {"version": "x"}),
        ("POST", "/forget", {"text": "x"}),
    ],
)
def test_what_does_not_exist_is_404(http, method, path, json):
    done = http.request(method, f"/v1/memories/nobody{path}", json=json)
    assert done.status_code == 404 and done.json()["error"]["code"] == "not_found"


def test_an_empty_memory_has_no_file(http, name):
    http.post("/v1/memories", json={"name": name})
    assert http.get(f"/v1/memories/{name}/content").status_code == 409
    fork = http.post(f"/v1/memories/{name}/fork").json()
    assert fork["tokens"] == 0 and sentences(http, fork["id"]) == []
