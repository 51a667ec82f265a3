"""Talking line by line: the commands between the lines, templates of instruction models, and no phrase twice."""

import io
import json
import sys

import pytest
from models import pairs_tokenizer

from remanence import Sampling, Session, cli
from remanence.cli.chat import Chat
from remanence.cli.sessions import Generate
from remanence.inference import memfile
from remanence.inference.chat import Turns
from remanence.io.files import read_json, write_json
from remanence.testing import assert_close
from remanence.tokenizers.tokens import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def talk(tmp_path, command, monkeypatch):
    """`talk(lines, ...)`: a chat with the model `m`, whose lines come from a pipe."""
    monkeypatch.chdir(tmp_path)
    cli.main(["new", "tiny", "m", "--variant", "lmm"])

    def talk(*lines, code=0, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        options = ("--max-tokens", 2, "--device", "cpu", *options)
        return command("chat", "m", *options, code=code)

    return talk


class TestCommands:
    def test_quit_ends_it(self, talk, tmp_path):
        talk("/quit", "hello", options=("--memory-file", "c.mem"))
        assert not (tmp_path / "c.mem").exists(), "nothing was said after /quit"
        assert talk() == "", "an empty file is an empty conversation"

    def test_save_writes_what_is_remembered(self, talk, tmp_path):
        said = talk("hello", "/save a.mem", "again", "/save b.mem", options=("--temperature", 0))
        assert "a.mem: 8 tokens" in said and "b.mem: 16 tokens" in said
        session = Session(tmp_path / "m")
        for line, name in (("\nhello", "a.mem"), ("\nagain", "b.mem")):
            session.generate(line, max_tokens=2, temperature=0)
            assert_close(memfile.load(tmp_path / name, session.model), session.state, 0.0)

    def test_save_overwrites_nothing_but_the_memory_in_use(self, talk, tmp_path):
        (tmp_path / "a.mem").write_text("precious")
        assert "/save: a.mem exists" in talk("hello", "/save a.mem", code=2)
        assert (tmp_path / "a.mem").read_text() == "precious"
        assert "/save: expected a file, as there is no --memory-file" in talk("/save", code=2)
        assert "/save: expected a folder that can be made, got a.mem" in talk("/save a.mem/b.mem", code=2)
        assert "c.mem: 8 tokens" in talk("hello", "/save", options=("--memory-file", "c.mem"))

    def test_forget_begins_anew(self, talk, tmp_path):
        said = talk("hello", "/forget", "again", options=("--memory-file", "c.mem", "--temperature", 0))
        assert "8 tokens forgotten; c.mem keeps them until the next answer" in said
        session = Session(tmp_path / "m")
        session.generate("\nagain", max_tokens=2, temperature=0)
        assert_close(memfile.load(tmp_path / "c.mem", session.model), session.state, 0.0)

    def test_another_command_is_refused(self, talk):
        assert "/sav: expected one of /memory [TEXT], /forget [TEXT], /save [FILE], /load" in talk(
            "/sav", code=2
        )
        talk(" /sav")

    def test_at_a_terminal_a_wrong_command_ends_nothing(self, talk, monkeypatch, capsys, tmp_path):
        typed = iter(["/sav", "/save", "hello", "/save a.mem", "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        cli.main(["chat", "m", "--max-tokens", "2"])
        out, err = capsys.readouterr()
        assert "0 tokens remembered. /memory" in out and err.count("\n") == 2
        assert (tmp_path / "a.mem").is_file()


def test_a_seed_is_the_same_talk_and_none_is_another(talk):
    """Each answer has chances of its own: the same line is answered in two ways."""
    options = ("--max-tokens", 8, "--temperature", 2, "--write", "none")
    seeded = [talk("hello", "hello", options=(*options, "--seed", 5)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert len({talk("hello", options=options) for _ in range(3)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", pytest.param("generate", marks=pytest.mark.exhaustive)])
def test_the_small_reader_repeats_no_phrase_by_default(command, monkeypatch, name):
    """At its most likely words, which it would otherwise repeat."""
    question = "Tell me about the sea."

    def repeated(*more):
        monkeypatch.setattr(sys, "stdin", io.StringIO(question + "\n"))
        prompt = ("--prompt", f"\n{question}") if name == "generate" else ()
        said = command(name, "remanence-small", *prompt, "--max-tokens", 150, *more).encode()
        phrases = [said[start : start + 16] for start in range(len(said) - 15)]
        return len(phrases) - len(set(phrases))

    assert repeated("--temperature", 0) > 5
    assert repeated("--temperature", 0, "--no-repeat", 16) == 0
    assert repeated("--temperature", 1e-6, "--no-repeat", 0) > 5
    assert repeated("--temperature", 1e-6) == 0
    assert repeated() == 0


def test_generate_and_chat_have_the_defaults_of_a_session():
    for command in (Generate(model="m", prompt=("a",)), Chat(model="m")):
        assert command.sampling() == Sampling()


def test_the_small_reader_answers_what_it_was_told(command, monkeypatch, tmp_path):
    text, memory = tmp_path / "told.txt", tmp_path / "told.mem"
    text.write_text("It was a long way home. The number of the sharp dragon is 4013947. They went on.\n")
    command("read", "remanence-small", text, "--save", memory)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the number of the sharp dragon?\n"))
    said = command("chat", "remanence-small", "--memory-file", memory, "--max-tokens", 9)
    assert said.split()[0].startswith("4013947")


class TestTemplate:
    @pytest.fixture
    def folder(self, tmp_path):
        pairs_tokenizer(tmp_path / "pairs.json").save(tmp_path)
        return tmp_path

    def told(self, folder, **settings):
        write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "bos_token": "<s>", **settings})
        return load_tokenizer(folder)

    @pytest.mark.parametrize("place", ["an entry", "entries by name", "a file"])
    def test_turns_put_together_are_the_whole_conversation(self, folder, place):
        """What Hugging Face's own rendering gives for all messages at once, wherever the template is kept."""
        transformers = pytest.importorskip("transformers")
        if place == "a file":
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        several = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        entry = {"an entry": {"chat_template": TEMPLATE}, "entries by name": {"chat_template": several}}
        turns = Turns(self.told(folder, **entry.get(place, {})))
        text = turns.text("Who?") + "Me." + turns.text("Where?")
        messages = [("user", "Who?"), ("assistant", "Me."), ("user", "Where?")]
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", chat_template=TEMPLATE
        ).apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == theirs
        turns.has_started = False
        assert turns.text("Who?").startswith("<s>")

    def test_it_is_saved_with_the_tokenizer(self, folder, tmp_path):
        (tmp_path / "other").mkdir()
        self.told(folder, chat_template=TEMPLATE).save(tmp_path / "other")
        assert Turns(load_tokenizer(tmp_path / "other")).text("a") == "<s><user>a</>\n<assistant>"
        assert read_json(tmp_path / "other" / "tokenizer_config.json")["chat_template"] == TEMPLATE

    def test_without_one_lines_are_read_as_they_are(self, folder):
        turns = Turns(self.told(folder))
        assert turns.text("a") + turns.text("b") == "\na\nb"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% if", "chat_template: cannot be used"),
            ("{{ raise_exception('no users') }}", "cannot be used .no users"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be used .*unsafe"),
            ("{{ messages.append(1) }}", "cannot be used .*unsafe"),
        ],
    )
    def test_a_strangers_template_is_one_line_at_most(self, folder, template, message):
        with pytest.raises(ValueError, match=message):
            Turns(self.told(folder, chat_template=template)).text("a")

    def test_one_that_drops_answers_is_refused(self, folder):
        turns = Turns(self.told(folder, chat_template="{{ messages[-1].content }}"))
        assert turns.text("a") == "a"
        with pytest.raises(ValueError, match="expected one that writes the messages of the assistant"):
            turns.text("b")

    def test_chat_speaks_by_it(self, tmp_path, command, monkeypatch):
        monkeypatch.chdir(tmp_path)
        pairs_tokenizer(tmp_path / "pairs.json")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        cli.main(["new", "tiny", "m", "--variant", "lmm", "--tokenizer", "pairs.json"])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        command("chat", "m", "--memory-file", "c.mem", "--max-tokens", 1, "--device", "cpu", "--seed", 1)
        (count,) = memfile.read_file(tmp_path / "c.mem")[0]["tokens"]
        assert len("<user>hello</>\n<assistant>") <= count <= len("<user>hello</>\n<assistant>") + 1
