"""OpenAI's API: the official client and plain HTTP get what a session alone would answer."""

import json
import threading

import openai
import pytest
from serving import GREEDY, MODEL, assistant, chat_session, running, user

from remanence import Session
from remanence.inference.chat import Turns

FACTS = ["My dog is called Rex.", "The code of the gate is 4711.", "What is my dog called?"]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return chat_session(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(session, tmp_path_factory):
    with running(session, tmp_path_factory.mktemp("data")) as found:
        yield found


@pytest.fixture
def client(served):
    return served.openai()


@pytest.fixture
def name(request):
    """A memory of the test's own."""
    return request.node.name[:200]


def alone(session, texts, settings=GREEDY):
    """What a session answers that no other request disturbs, as `remanence chat` does."""
    own, turns = Session(session.model, session.tokenizer), Turns(session.tokenizer)
    settings = {"no_repeat": 16, **settings}
    return [own.generate(turns.text(text), **settings) for text in texts]


def ask(client, *messages, **settings):
    return client.chat.completions.create(model=MODEL, messages=list(messages), **{**GREEDY, **settings})


class TestChat:
    def test_answers_are_those_of_a_chat_at_the_command_line(self, session, client, name):
        answers = [ask(client, user(text), user=name).choices[0].message.content for text in FACTS]
        assert answers == alone(session, FACTS)

    def test_a_client_that_sends_the_whole_conversation_has_it_read_once(self, session, client, served, name):
        messages, tokens = [], []
        for text, expected in zip(FACTS, alone(session, FACTS), strict=True):
            messages.append(user(text))
            found = ask(client, *messages, user=name)
            assert found.choices[0].message.content == expected
            messages.append(assistant(expected))
            tokens.append(found.usage.prompt_tokens)
        (memory,) = [each for each in served.memories.database.memories("local") if each.name == name]
        generated = 9 * len(FACTS)
        assert served.memories.head(memory).tokens == sum(tokens) + generated, "every token was read once"
        # A new conversation with the same memory.
        again, new = ask(client, user("Good morning."), user=name), [user("Good morning.")]
        assert again.usage.prompt_tokens == len(Turns(session.tokenizer).conversation(new, continues=True))

    def test_a_stream_has_the_same_text(self, session, client, name):
        stream = ask(client, user(FACTS[0]), user=name, stream=True, stream_options={"include_usage": True})
        parts = list(stream)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert [text] == alone(session, FACTS[:1])
        assert len(parts) > 4 and len({part.id for part in parts}) == 1
        assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + [
            "length"
        ]
        assert parts[-1].usage.completion_tokens == 9 and parts[-1].choices == []
        assert parts[0].choices[0].delta.role == "assistant"

    def test_a_header_names_the_memory_too(self, session, client, served, name):
        found = [ask(client, user(text), extra_headers={"X-Session-Id": name}) for text in FACTS]
        assert [each.choices[0].message.content for each in found] == alone(session, FACTS)
        with pytest.raises(openai.BadRequestError, match="X-Session-Id"):
            ask(client, user("x"), user="other", extra_headers={"X-Session-Id": name})

    def test_without_a_name_nothing_is_kept(self, session, client, served):
        before = served.memories.database.all_versions()
        conversation = [user(FACTS[0]), assistant("Rex!"), user(FACTS[2])]
        one, two = (ask(client, *conversation).choices[0].message.content for _ in range(2))
        own = Session(session.model, session.tokenizer)
        text = Turns(session.tokenizer).conversation(conversation, continues=False)
        assert one == two == own.generate(text, no_repeat=16, **GREEDY)
        assert served.memories.database.all_versions() == before

    def test_parts_of_a_message_and_options(self, session, client, name):
        parts = [{"type": "text", "text": FACTS[0][:5]}, {"type": "text", "text": FACTS[0][5:]}]
        options = {"max_completion_tokens": 4, "stop": ["zz"], "seed": -1, "top_p": 0.9, "temperature": 0.8}
        content = [
            ask(client, {"role": "user", "content": text}, user=f"{name}{number}", max_tokens=None, **options)
            .choices[0].message.content for number, text in enumerate((parts, FACTS[0]))
        ]  # fmt: skip
        settings = {"max_tokens": 4, "seed": -1 % 2**62, "top_p": 0.9, "temperature": 0.8, "stop": ("zz",)}
        assert content == 2 * alone(session, FACTS[:1], settings)

    def test_sessions_together_get_what_each_gets_alone(self, session, served, name):
        """Twelve clients at once, three turns each, streamed or whole: more than the server has rows for."""
        found = {}

        def talk(number):
            client, texts = served.openai(), [f"I am number {number}. " * (1 + number % 3), *FACTS[1:]]
            answers = []
            for text in texts:
                options = {"user": f"{name}{number}", "max_tokens": 3 + number}
                if number % 2:
                    parts = ask(client, user(text), stream=True, **options)
                    answers.append("".join(part.choices[0].delta.content or "" for part in parts))
                else:
                    answers.append(ask(client, user(text), **options).choices[0].message.content)
            found[number] = texts, answers

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, (texts, answers) in found.items():
            assert answers == alone(session, texts, {"temperature": 0, "max_tokens": 3 + number}), number
        assert len(found) == 12

    def test_two_requests_at_once_for_one_memory_come_one_after_the_other(self, session, served, name):
        found = []
        talk = lambda text: found.append(ask(served.openai(), user(text), user=name).usage.prompt_tokens)
        threads = [threading.Thread(target=talk, args=(text,)) for text in FACTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory = served.memories.find("local", name)
        assert served.memories.head(memory).tokens == sum(found) + 9 * len(FACTS)
        assert len(served.memories.database.versions(memory.id)) == 1 + len(FACTS)


class TestOther:
    def test_completions(self, session, client, name):
        settings = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        one = client.completions.create(prompt="Once upon", **settings)
        own = Session(session.model, session.tokenizer)
        assert one.choices[0].text == own.generate("Once upon", no_repeat=16, temperature=0, max_tokens=6)
        parts = client.completions.create(prompt=["Once upon"], stream=True, **settings)
        assert "".join(part.choices[0].text for part in parts) == one.choices[0].text
        assert one.usage.prompt_tokens == len("Once upon")

    def test_models(self, client):
        assert [each.id for each in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="model: expected 'tiny'"):
            client.models.retrieve("gpt-4")


class TestResponses:
    def create(self, client, text, **settings):
        options = {"model": MODEL, "temperature": 0, "max_output_tokens": 9}
        return client.responses.create(input=text, **{**options, **settings})

    def test_a_conversation_by_previous_response(self, session, client):
        found, last = [], None
        for text in FACTS:
            last = self.create(client, text, previous_response_id=last and last.id)
            found.append(last.output_text)
        assert found == alone(session, FACTS)
        assert last.status == "incomplete" and last.incomplete_details.reason == "max_output_tokens"

    def test_an_earlier_response_can_be_continued_again(self, session, client, served):
        """A branch: the answer is that of a conversation without what came later, which goes on undisturbed."""
        first = self.create(client, FACTS[0])
        second = self.create(client, FACTS[1], previous_response_id=first.id)
        branch = self.create(client, FACTS[2], previous_response_id=first.id)
        after = self.create(client, FACTS[2], previous_response_id=second.id)
        of_branch = self.create(client, FACTS[1], previous_response_id=branch.id)
        assert [second.output_text, after.output_text] == alone(session, FACTS)[1:]
        assert [branch.output_text, of_branch.output_text] == alone(session, [FACTS[0], FACTS[2], FACTS[1]])[
            1:
        ]
        version = served.memories.find_version("local", after.id.replace("resp_", "ver_"))
        memory = served.memories.find("local", version.memory)
        assert memory.head == version.id, "branches do not become the newest version"

    def test_a_named_memory_and_rollback(self, session, client, served, name):
        first = self.create(client, FACTS[0], user=name)
        self.create(client, FACTS[1], user=name)
        done = served.http().post(f"/v1/memories/{name}/rollback", json={"version": first.id})
        assert done.status_code == 200 and done.json()["version"] == first.id.replace("resp_", "ver_")
        found = ask(client, user(FACTS[2]), user=name).choices[0].message.content
        assert found == alone(session, [FACTS[0], FACTS[2]])[1]

    def test_unknown_ids_fail(self, client, name):
        with pytest.raises(openai.NotFoundError, match="version"):
            self.create(client, "x", previous_response_id="resp_0123")
        first = self.create(client, FACTS[0])
        self.create(client, FACTS[0], user=name)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            self.create(client, "x", previous_response_id=first.id, user=name)

    def test_store_false_keeps_nothing(self, client, served):
        before = served.memories.database.all_versions()
        assert self.create(client, FACTS[0], store=False).output_text
        assert served.memories.database.all_versions() == before

    def test_instructions_and_messages(self, session, client):
        found = self.create(client, [user(FACTS[0])], instructions="Be brief.", store=False)
        conversation = [{"role": "system", "content": "Be brief."}, user(FACTS[0])]
        text = Turns(session.tokenizer).conversation(conversation, continues=False)
        own = Session(session.model, session.tokenizer)
        assert found.output_text == own.generate(text, no_repeat=16, **GREEDY)

    def test_a_stream(self, session, client):
        events = list(self.create(client, FACTS[0], stream=True))
        parts = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(parts) == alone(session, FACTS[:1])[0]
        assert [each.sequence_number for each in events] == list(range(len(events)))
        assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == alone(session, FACTS[:1])[0]
        again = self.create(client, FACTS[1], previous_response_id=events[-1].response.id)
        assert again.output_text == alone(session, FACTS[:2])[1]


GOOD = {"model": MODEL, "messages": [user("x")], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", {**GOOD, "model": "gpt-4"}, 404, "model_not_found", "model"),
        ("chat/completions", {**GOOD, "messages": []}, 400, "invalid_value", "messages"),
        ("chat/completions", {**GOOD, "messages": [assistant("x")]}, 400, "invalid_value", "messages"),
        ("chat/completions", {**GOOD, "messages": [user(" ")]}, 400, "invalid_value", "messages"),
        ("chat/completions", {**GOOD, "temperatur": 1}, 400, "invalid_value", "temperatur"),
        ("chat/completions", {**GOOD, "temperature": -1}, 400, "invalid_value", "temperature"),
        ("chat/completions", {**GOOD, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("chat/completions", {**GOOD, "n": 2}, 400, "invalid_value", "n"),
        ("chat/completions", {**GOOD, "tools": [{"type": "function"}]}, 400, "invalid_value", "tools"),
        ("chat/completions", {**GOOD, "logprobs": True}, 400, "invalid_value", "logprobs"),
        ("chat/completions", {**GOOD, "user": "a\nb"}, 400, "invalid_value", "user"),
        ("chat/completions", {**GOOD, "user": "mem_0123"}, 404, "not_found", "memory"),
        ("completions", {"model": MODEL, "prompt": ""}, 400, "invalid_value", "prompt"),
        ("completions", {"model": MODEL, "prompt": ["a", "b"]}, 400, "invalid_value", "prompt"),
        ("responses", {"model": MODEL, "input": []}, 400, "invalid_value", "input"),
        ("chat/completions", {**GOOD, "user": "\ud800"}, 400, "invalid_value", "user"),
        ("nothing", {}, 404, "not_found", "request"),
    ],
)  # fmt: skip
def test_wrong_requests_have_the_form_of_openai(served, path, body, status, code, param):
    data = json.dumps(body).encode()
    done = served.http().post(f"/v1/{path}", content=data, headers={"Content-Type": "application/json"})
    error = done.json()["error"]
    assert (done.status_code, error["code"]) == (status, code), done.text
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert error["param"] == param, error


def test_half_a_character_is_replaced(served):
    """JSON may contain it, UTF-8 cannot."""
    texts = {"input": [user("a \ud800 b")], "instructions": "\udfff"}
    body = json.dumps({"model": MODEL, "store": False, **texts})
    done = served.http().post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert done.status_code == 200 and done.json()["instructions"] == "\ufffd"


def test_a_body_that_is_not_json(served):
    done = served.http().post(
        "/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert done.status_code == 400 and done.json()["error"]["type"] == "invalid_request_error"
    done = served.http().get("/v1/chat/completions")
    assert done.status_code == 405 and done.json()["error"]["code"] == "method_not_allowed"


def test_health_metrics_and_schema(served):
    http = served.http()
    assert http.get("/healthz").json() == {"status": "ok"} and http.get("/readyz").status_code == 200
    before = http.get("/metrics").text
    assert ask(served.openai(), user("x")).usage.completion_tokens == 9
    after = http.get("/metrics").text
    count = lambda text: float(text.split("\nremanence_tokens_generated ")[1].split()[0])
    assert count(after) == count(before) + 9
    assert 'remanence_requests_total{route="/v1/chat/completions",status="200"}' in after
    schema = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/responses", "/v1/memories"} <= set(schema["paths"])
