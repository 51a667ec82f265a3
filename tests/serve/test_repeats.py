"""A request that is sent again gets the answer that was committed, and its memory does not change."""

import sqlite3
import threading
from contextlib import nullcontext

import pytest
from postgres import cluster, emptied
from serving import GREEDY, MODEL, assistant, chat_session, running, user

from remanence.serve.database import SCHEMA_VERSION, Answer, ConflictError, Database, Version, new_id

FIRST, SECOND = "My dog is called Rex.", "The code of the gate is 4711."


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return chat_session(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(session, tmp_path_factory):
    with running(session, tmp_path_factory.mktemp("data"), keep_versions=4) as found:
        yield found


@pytest.fixture
def name(request):
    """A memory of the test's own."""
    return request.node.name[:200]


def post(served, route, body, key=None):
    headers = {} if key is None else {"Idempotency-Key": key}
    with served.http() as http:
        return http.post(f"/v1/{route}", json={"model": MODEL, "temperature": 0, **body}, headers=headers)


def chat(served, name, messages, key=None, **settings):
    body = {"user": name, "messages": messages, "max_tokens": 9, **settings}
    return post(served, "chat/completions", body, key)


def text(done):
    return done.raise_for_status().json()["choices"][0]["message"]["content"]


def state(served, name):
    """Everything that a request could change."""
    memory = served.memories.find("local", name)
    return memory, served.memories.database.versions(memory.id), served.memories.store.names()


def conversation(served, name):
    """A conversation with a memory up to the second message, which was answered."""
    messages = [user(FIRST)]
    messages += [assistant(text(chat(served, name, messages))), user(SECOND)]
    return messages, chat(served, name, messages)


def same(one, other):
    """Whether two responses have the same answer and usage, and the second is a repetition."""
    first, second = one.raise_for_status().json(), other.raise_for_status().json()
    is_repeated = [each.headers.get("Idempotent-Replayed") for each in (one, other)] == [None, "true"]
    kept = one.headers["X-Memory-Version"] == other.headers["X-Memory-Version"]
    return is_repeated and kept and {**first, "created": 0} == {**second, "created": 0}


def test_a_whole_conversation_is_read_once(served, name):
    messages, done = conversation(served, name)
    before = state(served, name)
    assert same(done, chat(served, name, messages)) and state(served, name) == before
    messages += [assistant(text(done)), user("Good night.")]
    following = chat(served, name, messages)
    tokens = [each.json()["usage"]["total_tokens"] for each in (done, following)]
    assert state(served, name)[1][-1].tokens == before[1][-2].tokens + sum(tokens)


def test_another_request_is_no_repetition(served, name):
    """Another sampling; a message that is the whole request, which may be meant; another memory."""
    messages, _ = conversation(served, name)
    longer = chat(served, name, messages, max_tokens=11)
    assert "Idempotent-Replayed" not in longer.headers and longer.json()["usage"]["completion_tokens"] == 11
    single = [chat(served, name, [user("Yes.")]) for _ in range(2)]
    assert single[0].headers["X-Memory-Version"] != single[1].headers["X-Memory-Version"]
    other = chat(served, f"{name} 2", messages)
    assert "Idempotent-Replayed" not in other.headers and other.json()["usage"]["prompt_tokens"] > 40


def test_after_a_rollback_the_same_request_is_answered_anew(served, name):
    messages, done = conversation(served, name)
    versions = state(served, name)[1]
    with served.http() as http:
        http.post(f"/v1/memories/{name}/rollback", json={"version": versions[-2].id}).raise_for_status()
    again = chat(served, name, messages)
    assert again.headers["X-Memory-Version"] != done.headers["X-Memory-Version"]
    assert text(again) == text(done) and "Idempotent-Replayed" not in again.headers


@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses", "read"])
def test_a_key_names_a_request(served, name, route):
    """Also the first one of a memory, and after later ones."""
    body = {
        "chat/completions": {"user": name, "messages": [user(FIRST)], "max_tokens": 9},
        "completions": {"user": name, "prompt": FIRST, "max_tokens": 9},
        "responses": {"input": FIRST, "max_output_tokens": 9},
    }.get(route)
    key, names = f"key of {name}", served.memories.store.names()
    if route == "read":
        with served.http() as http:
            read = lambda: http.post(
                f"/v1/memories/{name}/read", json={"text": FIRST}, headers={"Idempotency-Key": key}
            )
            assert read().raise_for_status().json() == read().raise_for_status().json()
        assert len(served.memories.store.names() - names) == 1
        return
    done = post(served, route, body, key)
    made = served.memories.store.names() - names
    again = post(served, route, body, key)
    strip = lambda each: {**each.raise_for_status().json(), "created": 0, "created_at": 0}
    assert strip(done) == strip(again) and again.headers["Idempotent-Replayed"] == "true"
    assert served.memories.store.names() - names == made and len(made) == 1
    refused = post(served, route, {**body, "temperature": 1}, key)
    assert refused.status_code == 400 and "Idempotency-Key: expected a new one" in refused.text
    if route == "chat/completions":
        later = chat(served, name, [user(SECOND)])
        before = state(served, name)
        assert same(done, post(served, route, body, key)) and state(served, name) == before
        assert before[0].head == later.headers["X-Memory-Version"]


def test_a_repetition_can_be_streamed(served, name):
    key = {"Idempotency-Key": name}
    ask = lambda stream: served.openai().chat.completions.create(
        model=MODEL, messages=[user(FIRST)], user=name, extra_headers=key, stream=stream, **GREEDY
    )
    parts = list(ask(True))
    again, whole = list(ask(True)), ask(False)
    said = ["".join(part.choices[0].delta.content or "" for part in each) for each in (parts, again)]
    assert said == [whole.choices[0].message.content] * 2 and said[0]
    assert {part.id for part in (*parts, *again, whole)} == {whole.id}


def test_one_of_many_at_a_time_is_read(served, name):
    done, threads = [], []
    for _ in range(5):
        ask = lambda: done.append(chat(served, name, [user(FIRST)], name))
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len({text(each) for each in done}) == 1
    assert len({each.headers["X-Memory-Version"] for each in done}) == 1
    assert sorted("Idempotent-Replayed" in each.headers for each in done) == [False, *[True] * 4]


@pytest.mark.parametrize("way", ["delete", "forget"])
def test_a_deleted_answer_is_in_no_file(session, tmp_path, way):
    """Nor one to a request in which a forgotten fact was."""
    folder = tmp_path / "data"
    with running(session, folder) as served, served.http() as http:
        answer = "".join(f"&{index}" for index in range(40))
        memory = served.memories.find_or_create("local", "ann")
        chat(served, "ann", [user(FIRST)]).raise_for_status()
        head = served.memories.head(served.memories.find("local", "ann"))
        reply = Answer(new_id("ver"), "local", None, "", answer, "stop", 1, 1)
        served.memories.commit(
            head, served.memories.load(head), identifier=reply.version, answer=reply, messages=1, digest="d"
        )
        stored = lambda: b"".join(path.read_bytes() for path in folder.glob("memories.sqlite*"))
        assert answer.encode() in stored()
        if way == "delete":
            http.delete("/v1/memories/ann").raise_for_status()
        else:
            http.post("/v1/memories/ann/forget", json={"text": FIRST}).raise_for_status()
            assert served.memories.find("local", "ann").id == memory.id
        assert answer.encode() not in stored()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_of_two_answers_with_one_key_one_is_committed(tmp_path, kind):
    """By servers that share only the table."""
    with cluster() if kind == "postgres" else nullcontext() as url:
        if kind == "postgres" and url is None:
            pytest.skip("there is no PostgreSQL here")
        database = emptied(url) if kind == "postgres" else Database(tmp_path / "a.sqlite")
        found = []
        for _ in range(2):
            memory = database.create("ann")
            version = Version(new_id("ver"), memory.id, memory.head, 1, 1, 1, "", 1.0)
            found.append((memory, version, Answer(version.id, "ann", "key", "request", "yes", "stop", 1, 1)))
        memory, version, answer = found[0]
        database.commit(version, memory.head, answer)
        memory, version, other = found[1]
        with pytest.raises(ConflictError, match="Idempotency-Key"):
            database.commit(version, memory.head, other)
        assert database.version("ann", version.id) is None and database.memory("ann", memory.id) == memory
        database.commit(version, memory.head, other._replace(owner="bob"))
        assert database.answer_to("ann", "key") == database.answer_of(answer.version) == answer
        database.delete(found[0][0].id)
        assert database.answer_to("ann", "key") is None and database.answer_of(version.id) is not None
        database.close()


def test_the_tables_of_an_earlier_server_are_completed(tmp_path):
    path = tmp_path / "memories.sqlite"
    database = Database(path)
    memory = database.create("ann", "work")
    database.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE answers")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    database = Database(path)
    assert database.memories("ann") == [memory] and database.answer_of(memory.head) is None
    assert database._rows("PRAGMA user_version") == [(SCHEMA_VERSION,)]
    database.close()
