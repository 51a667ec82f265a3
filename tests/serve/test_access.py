"""Who may do what: keys, quotas, limits of time and size, clients that leave, and what the log shows."""

import json
import threading
import time

import pytest
from serving import GREEDY, MODEL, chat_session, running, user

from remanence.serve.access import add_key
from remanence.serve.database import Database
from remanence.serve.server import Server, Settings

SECRET = "the pelican's sandwich"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return chat_session(tmp_path_factory.mktemp("model"))


def make_keys(folder, *owners):
    folder.mkdir()
    database = Database(folder / "memories.sqlite")
    found = [add_key(database, owner)[1] for owner in owners]
    database.close()
    return found


def body(text="hello", **settings):
    return {"model": MODEL, "messages": [user(text)], **GREEDY, **settings}


def ask(http, text="hello", **settings):
    return http.post("/v1/chat/completions", json=body(text, **settings))


def read_some(response):
    """The lines of a stream after the first pieces of text. As long as they are held, the connection is open."""
    lines = response.iter_lines()
    while '"content": ""' in (line := next(lines)) or not line:
        pass
    return lines


def code(done):
    return done.status_code, done.json()["error"]["code"]


@pytest.fixture(scope="module")
def keys(session, tmp_path_factory):
    """A server, two keys of one owner, and one of another."""
    folder = tmp_path_factory.mktemp("keys") / "data"
    keys = make_keys(folder, "ann", "ann", "bob")
    with running(session, folder) as served:
        yield served, *keys


class TestKeys:
    def test_a_key_is_required(self, keys):
        served, ann, *_ = keys
        for wrong in (None, "", "sk-rem-wrong", ann[:-1]):
            done = served.http(wrong).get("/v1/models")
            assert code(done) == (401, "invalid_api_key") and done.headers["WWW-Authenticate"] == "Bearer"
        assert code(ask(served.http())) == (401, "invalid_api_key")
        assert served.http(ann).get("/v1/models").status_code == 200
        assert served.http().get("/healthz").status_code == 200

    def test_keys_are_hashed_at_rest(self, keys):
        served, *texts = keys
        for path in served.memories.folder.rglob("*"):
            if path.is_file():
                assert not [
                    text for text in texts if text.removeprefix("sk-rem-").encode() in path.read_bytes()
                ]

    def test_another_key_s_memory_is_404(self, keys):
        served, ann, ann_too, bob = keys
        assert ask(served.http(ann), user="diary").status_code == 200
        memory = served.http(ann_too).get("/v1/memories/diary").json()
        other, path = served.http(bob), f"/v1/memories/{memory['id']}"
        response = memory["version"].replace("ver_", "resp_")
        content = served.http(ann).get(f"{path}/content").content
        for done in (
            other.get("/v1/memories/diary"),
            other.get(path),
            other.delete(path),
            other.get(f"{path}/versions"),
            other.get(f"{path}/sentences"),
            other.get(f"{path}/content"),
            other.put(f"{path}/content", content=content),
            other.post(f"{path}/fork", json={}),
            other.post(f"{path}/rollback", json={"version": memory["version"]}),
            other.post(f"{path}/forget", json={"text": "hello"}),
            other.post(f"{path}/read", json={"text": "hello"}),
            ask(other, user=memory["id"]),
            ask(other, user=memory["id"], stream=True),
            other.post(
                "/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": response}
            ),
        ):
            assert code(done) == (404, "not_found"), done.request.url
        assert other.get("/v1/memories").json()["data"] == []
        assert ask(other, user="diary").json()["usage"] == ask(served.http(ann), user="new").json()["usage"]
        assert served.http(ann).get("/v1/memories/diary").json() == memory, "nothing has changed"

    def test_a_server_that_runs_follows_keys(self, session, tmp_path):
        """It needs one as soon as there is one, and is not open again when all are removed."""
        folder = tmp_path / "data"
        with running(session, folder) as served:
            database = Database(folder / "memories.sqlite")  # as the command does, in another process
            assert served.http().get("/v1/models").status_code == 200
            key, text = add_key(database, "ann")
            assert code(served.http().get("/v1/models")) == (401, "invalid_api_key")
            assert served.http(text).get("/v1/models").status_code == 200
            database.remove_key(key.id)
            for each in (None, text):
                assert code(served.http(each).get("/v1/models")) == (401, "invalid_api_key")
            database.close()

    def test_others_cannot_reach_a_server_without_keys(self, session, tmp_path):
        with pytest.raises(ValueError, match=r"^--host: expected an API key .*, got 0\.0\.0\.0 and no key"):
            Server(session, Settings(name=MODEL, folder=tmp_path, host="0.0.0.0"))


class TestQuotas:
    def test_of_memories(self, session, tmp_path):
        with running(session, tmp_path / "data", {"max_memories": 2}) as served, served.http() as http:
            assert ask(http, user="a").status_code == http.post("/v1/memories").status_code - 1 == 200
            content = http.get("/v1/memories/a/content").content
            for done in (
                ask(http, user="b"),
                http.post("/v1/memories"),
                http.post("/v1/memories/a/fork"),
                http.put("/v1/memories/b/content", content=content),
                http.post("/v1/memories/b/read", json={"text": "x"}),
                http.post("/v1/responses", json={"model": MODEL, "input": "x"}),
            ):
                assert code(done) == (429, "insufficient_quota")
            assert ask(http, user="a").status_code == ask(http).status_code == 200
            http.delete("/v1/memories/a")
            assert ask(http, user="b").status_code == 200

    def test_of_bytes(self, session, tmp_path):
        with running(session, tmp_path / "data", {"max_bytes": 200_000}) as served, served.http() as http:
            answers = [ask(http, user="a") for _ in range(9)]
            refused = [done for done in answers if done.status_code != 200]
            assert answers[0].status_code == 200 and {code(done) for done in refused} == {
                (429, "insufficient_quota")
            }
            assert served.memories.database.usage("local").bytes < 300_000
            assert code(http.post("/v1/memories/a/fork")) == (429, "insufficient_quota")

    def test_of_tokens(self, session, tmp_path):
        folder = tmp_path / "data"
        ann, bob = make_keys(folder, "ann", "bob")
        with running(session, folder, {"tokens_per_minute": 60}) as served:
            assert ask(served.http(ann)).status_code == ask(served.http(ann)).status_code == 200
            done = [ask(served.http(ann)) for _ in range(3)][-1]
            assert code(done) == (429, "rate_limit_exceeded") and 1 <= int(done.headers["Retry-After"]) <= 60
            assert ask(served.http(bob)).status_code == 200, "others are not affected"


@pytest.fixture(scope="module")
def strict(session, tmp_path_factory):
    limits = {"max_body": 1000, "max_upload": 5000}
    with running(session, tmp_path_factory.mktemp("data"), limits) as found:
        yield found


class TestSizes:
    def test_of_requests(self, strict):
        assert code(ask(strict.http(), "x" * 1000)) == (413, "too_large")
        parts = (b"x" for _ in range(2000))
        done = strict.http().post("/v1/chat/completions", content=parts)
        assert code(done) == (413, "too_large"), "a body whose length is not given"

    def test_of_uploads(self, strict):
        for content in (b"x" * 6000, (b"x" * 10 for _ in range(600))):
            done = strict.http().put("/v1/memories/a/content", content=content)
            assert code(done) == (413, "too_large")
        assert strict.memories.database.memories("local") == []


@pytest.fixture(scope="module")
def served(session, tmp_path_factory):
    with running(session, tmp_path_factory.mktemp("data"), max_rows=2) as found:
        yield found


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_ends_its_answer(self, served, stream):
        """The memory is as it was before, and the row is free."""
        http = served.http()
        name = f"a{stream}"
        before = http.post("/v1/memories", json={"name": name}).json()
        generated = served.server.engine.tokens_generated
        request = body("hello", user=name, stream=stream, max_tokens=60_000)
        with served.http() as leaving:
            if stream:
                with leaving.stream("POST", "/v1/chat/completions", json=request) as response:
                    read_some(response)
            else:
                with pytest.raises(Exception, match="timed out"):
                    leaving.post("/v1/chat/completions", json=request, timeout=1)
        served.wait_until_idle()
        assert 0 < served.server.engine.tokens_generated - generated < 60_000
        assert http.get(f"/v1/memories/{name}").json() == before
        known = served.memories.database.all_versions()
        assert served.memories.store.names() <= known, "no file is left"
        assert ask(http, user=name).status_code == 200

    def test_a_client_that_leaves_while_it_waits(self, served):
        with served.http() as first, served.http() as second:
            request = body("hello", user="b", stream=True, max_tokens=60_000)
            with first.stream("POST", "/v1/chat/completions", json=request) as response:
                lines = read_some(response)
                with pytest.raises(Exception, match="timed out"):
                    second.post("/v1/chat/completions", json=body(user="b"), timeout=0.5)
                del lines
        served.wait_until_idle()
        assert ask(served.http(), user="b").status_code == 200


def test_too_many_requests_are_refused(session, tmp_path):
    limits = {"max_waiting": 1, "timeout": 60}
    with running(session, tmp_path / "data", limits, max_rows=1) as served, served.http() as http:
        request = body(stream=True, max_tokens=60_000)
        found = []
        with http.stream("POST", "/v1/chat/completions", json=request) as response:
            lines = read_some(response)
            waiting = threading.Thread(target=lambda: found.append(ask(served.http())))
            waiting.start()
            while served.server.service.num_requests < 2:
                time.sleep(0.01)
            done = ask(served.http())
            assert code(done) == (503, "overloaded") and done.headers["Retry-After"] == "1"
            assert done.json()["error"]["type"] == "server_error"
            assert served.http().get("/v1/models").status_code == 200, "other requests are answered"
            del lines
        waiting.join()
        assert found[0].status_code == 200, "the one that waited has its turn when the client has left"


def test_the_time_limit(session, tmp_path):
    with running(session, tmp_path / "data", {"timeout": 1}, max_rows=1) as served, served.http() as http:
        assert code(ask(http, user="a", max_tokens=60_000)) == (504, "timeout")
        with http.stream(
            "POST", "/v1/chat/completions", json=body(stream=True, max_tokens=60_000)
        ) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert http.get("/v1/memories").json()["data"] == [], "nothing is kept"


def test_other_sites_cannot_use_a_local_server(session, tmp_path):
    with running(session, tmp_path / "data", hosts=("box.local",)) as served, served.http() as http:
        origin = {"Origin": "https://example.com"}
        done = http.get("/v1/models", headers=origin)
        assert not [name for name in done.headers if name.startswith("access-control")]
        preflight = {
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        assert http.options("/v1/chat/completions", headers=preflight).status_code == 405
        plain = http.post(
            "/v1/chat/completions", content=json.dumps(body()), headers={"Content-Type": "text/plain"}
        )
        assert plain.status_code == 400, "a form of another site cannot send it"
        assert code(http.get("/v1/models", headers={"Host": "example.com"})) == (421, "wrong_host")
        assert http.get("/v1/models", headers={"Host": "box.local:80"}).status_code == 200


def test_the_log_has_no_content(session, tmp_path, capsys):
    def broken(version):
        raise ZeroDivisionError(SECRET)

    with running(session, tmp_path / "data") as served, served.http() as http:
        ask(http, SECRET, user=f"name {SECRET}")
        ask(http, SECRET, nonsense=SECRET)
        http.get(f"/v1/memories/name {SECRET}/sentences", params={"query": SECRET})
        http.post(f"/v1/memories/name {SECRET}/forget", json={"text": SECRET})
        served.memories.load = broken
        assert code(ask(http, SECRET, user=f"name {SECRET}")) == (500, "internal_error")
    log = capsys.readouterr().err
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [line.get("status") for line in lines] == [200, 400, 200, 200, None, 500]
    assert lines[4]["error"] == "ZeroDivisionError" and lines[4]["where"][-1].endswith(" broken")
    assert lines[0]["route"] == "/v1/chat/completions" and lines[0]["owner"] == "local"
    assert "pelican" not in log
