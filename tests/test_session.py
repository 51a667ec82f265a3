"""Reading, generating, forking: what is read in pieces is what is read at once, and a batch is its prompts alone."""

import json

import pytest
import torch
from models import VARIANTS, model, pairs_tokenizer

from remanence import Generation, Model, Sampling, Session, preset
from remanence.inference import sampling
from remanence.inference.sampling import choose
from remanence.model import memories
from remanence.testing import assert_close
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, byte_level_json, load_tokenizer

pytestmark = pytest.mark.sample(1)

TEXT = "Call me Ishmael. Some years ago - never mind how long précisément - having little or no money in my purse. "


def bytes_model(variant="mac", dtype=torch.float32, **fields):
    return model(variant, dtype, vocab_size=257, **fields).eval()


def greedy(subject, text, count):
    """The plain loop: the whole text again for every token."""
    tokens = list(text.encode())
    for _ in range(count):
        tokens.append(int(subject(torch.tensor([tokens]))[0][0, -1].argmax()))
    return tokens[len(text.encode()) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_generating_is_the_plain_loop(variant):
    subject = bytes_model(variant, torch.float64)
    session = Session(subject)
    session.read(TEXT[:37])
    generation = Generation(
        subject, [TEXT[37:60]], Sampling(temperature=0.0, max_tokens=20), state=session.state
    ).run()
    expected = greedy(subject, TEXT[:60], 20)
    ended = expected.index(256) if 256 in expected else 20
    assert generation.tokens[0] == expected[:ended]
    assert generation.texts[0] == ByteTokenizer().decode(expected[:ended])
    assert generation.state.position.tolist() == [len(TEXT[:60].encode()) + ended]


def test_where_new_tensors_go_is_no_matter():
    """Whoever sets torch's default device has it set while a model elsewhere generates."""
    session = Session(bytes_model("lmm"))
    with torch.device("meta"):
        generation = Generation(session.model, [TEXT[:20]], Sampling(temperature=0.0, max_tokens=5)).run()
    assert (
        generation.tokens
        == Generation(session.model, [TEXT[:20]], Sampling(temperature=0.0, max_tokens=5)).run().tokens
    )


@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "lmm", "attention"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_of_unequal_prompts_is_each_alone(variant, temperature):
    subject = bytes_model(variant, torch.float64)
    prompts = [TEXT[:5], TEXT[:31], "x", TEXT[3:20]]
    together = Generation(subject, prompts, Sampling(max_tokens=15, temperature=temperature, seed=7)).run()
    for row, prompt in enumerate(prompts):
        alone = Generation(
            subject, [prompt], Sampling(max_tokens=15, temperature=temperature, seed=7 + row)
        ).run()
        assert together.tokens[row] == alone.tokens[0]
        if variant != "attention":
            assert_close(together.state.rows(row), alone.state, 1e-9)


def test_without_a_seed_every_call_draws_anew_and_a_seed_repeats_it():
    """Forks of one session, and the same call again: another text each time, unless a seed is given."""
    session = Session(bytes_model("lmm"))
    session.read(TEXT[:9])
    forks = [session.fork() for _ in range(3)]
    fields = {"max_tokens": 8, "temperature": 1.0}
    assert len({fork.generate("And", **fields) for fork in forks}) == 3
    assert len({session.fork().generate("And", **fields, seed=3) for _ in range(3)}) == 1
    assert len({session.fork().generate("And", max_tokens=8, temperature=0) for _ in range(3)}) == 1, (
        "greedy has no chance"
    )
    torch.manual_seed(1)
    state = torch.get_rng_state()
    session.generate("And", **fields)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"


class TestNoRepeat:
    def phrases(self, tokens, size):
        return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]

    @pytest.mark.parametrize("size", [1, 2, 5])
    @pytest.mark.parametrize("temperature", [0.0, 0.5])
    def test_no_phrase_is_said_twice(self, size, temperature):
        """The rows of a batch have each their own; without the rule, the model says the same again and again."""
        subject, prompts = bytes_model("window"), [TEXT[:5], TEXT[:31]]
        fields = {"max_tokens": 30, "temperature": temperature, "seed": 1}
        free = Generation(subject, prompts, Sampling(**fields)).run()
        held = Generation(subject, prompts, Sampling(**fields, no_repeat=size)).run()
        for row, prompt in enumerate(prompts):
            said = self.phrases(held.tokens[row], size)
            assert len(said) == len(set(said))
            other = Sampling(**{**fields, "seed": 1 + row}, no_repeat=size)
            assert held.tokens[row] == Generation(subject, [prompt], other).run().tokens[0]
        assert sum(map(len, held.tokens)) > 20
        if not temperature:
            assert any(len(found) > len(set(found)) for found in (self.phrases(t, size) for t in free.tokens))

    def test_only_the_token_that_would_repeat_is_barred(self, monkeypatch):
        """With logits that are always the same, a before b before the rest."""
        logits = torch.full((257,), -9.0)
        logits[97], logits[98] = 2.0, 1.0
        monkeypatch.setattr(Generation, "_check_finite", lambda *_: logits.expand(1, -1))
        found = Generation(
            bytes_model("lmm"), ["x"], Sampling(temperature=0.0, max_tokens=5, no_repeat=2)
        ).run()
        assert found.texts == ["aaba\0"], "aa, ab, ba; then neither aa nor ab again"

    def test_by_default_an_answer_is_sampled_and_repeats_no_phrase(self, tmp_path):
        """Greedy decoding is plain, and 0 allows repetition."""
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(byte_level_json()))
        bytes_of, others = ByteTokenizer(), JsonTokenizer(path)
        assert Sampling().temperature > 0
        assert (Sampling().phrase(bytes_of), Sampling().phrase(others)) == (16, 6)
        assert Sampling(temperature=0.0).phrase(bytes_of) is None
        assert Sampling(no_repeat=0).phrase(bytes_of) is None
        assert Sampling(temperature=0.0, no_repeat=3).phrase(bytes_of) == 3
        subject = bytes_model("window")
        said = Generation(subject, [TEXT[:31]], Sampling(max_tokens=200, temperature=1e-6, seed=1)).run()
        found = self.phrases(said.tokens[0], 16)
        assert len(found) == len(set(found)) > 20
        greedy = Generation(subject, [TEXT[:31]], Sampling(max_tokens=200, temperature=0.0)).run()
        found = self.phrases(greedy.tokens[0], 16)
        assert len(found) > len(set(found)), "a model that repeats itself"

    def test_something_is_always_said(self, monkeypatch):
        monkeypatch.setattr(Generation, "_check_finite", lambda *_: torch.zeros(1, 4))
        found = Generation(
            bytes_model("lmm"), ["x"], Sampling(temperature=0.0, max_tokens=9, no_repeat=1)
        ).run()
        assert len(found.tokens[0]) == 9 and set(found.tokens[0][:4]) == {0, 1, 2, 3}


def test_stop_texts_end_the_output_and_are_never_shown(monkeypatch):
    subject = bytes_model("lmm")
    script = "say ab then abc and more"
    for stop, shown in (
        (("abc",), "say ab then "),
        (("then", "say ab t"), ""),
        (("zzz",), script),
        (("e",), "say ab th"),
    ):
        letters = iter(script.encode())
        monkeypatch.setattr(sampling, "choose", lambda *_, letters=letters: next(letters))
        generation = Generation(subject, ["x"], Sampling(temperature=0.0, max_tokens=len(script), stop=stop))
        pieces = [text for _, text in generation]
        assert "".join(pieces) == generation.texts[0] == shown
        assert not any(text in "".join(pieces[:n]) for n in range(len(pieces) + 1) for text in stop)


def test_half_characters_are_held_back(monkeypatch):
    letters = iter("aé🎉".encode() + b"\xf0\x9f")
    monkeypatch.setattr(sampling, "choose", lambda *_: next(letters))
    pieces = [
        text for _, text in Generation(bytes_model("lmm"), ["x"], Sampling(temperature=0.0, max_tokens=9))
    ]
    assert pieces == ["a", "é", "🎉", "\N{REPLACEMENT CHARACTER}"]


def test_the_end_of_a_document_ends_the_output(monkeypatch):
    letters = iter([65, 66, 256, 67])
    monkeypatch.setattr(sampling, "choose", lambda *_: next(letters))
    generation = Generation(bytes_model("lmm"), ["x"], Sampling(temperature=0.0, max_tokens=9)).run()
    assert generation.texts == ["AB"]
    assert generation.state.position.tolist() == [3], "the mark itself is no part of what was said"


class TestChoosing:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])

    def drawn(self, **fields):
        chance = torch.Generator().manual_seed(0)
        return [choose(self.logits, Sampling(temperature=1.0, **fields), chance) for _ in range(400)]

    def test_greedy(self):
        assert choose(self.logits, Sampling(temperature=0.0), torch.Generator()) == 1

    def test_top_k(self):
        assert set(self.drawn(top_k=2)) == {1, 3}
        assert set(self.drawn(top_k=1)) == {1}

    def test_top_p(self):
        shares = self.logits.softmax(0)  # token 1: 0.64, token 3: 0.23, token 2: 0.09
        assert set(self.drawn(top_p=float(shares[1]) - 1e-3)) == {1}
        assert set(self.drawn(top_p=float(shares[1]) + 1e-3)) == {1, 3}

    def test_frequencies_are_the_softmax(self):
        drawn = torch.tensor(self.drawn()).bincount(minlength=5) / 400
        assert (drawn - self.logits.softmax(0)).abs().max() < 0.06

    def test_ties_and_the_coldest_temperature(self):
        chance, tied = torch.Generator().manual_seed(0), torch.zeros(10)
        assert len({choose(tied, Sampling(temperature=1.0, top_k=2), chance) for _ in range(60)}) == 2
        assert choose(self.logits, Sampling(temperature=1e-320), chance) == 1

    def test_temperature_and_seed(self):
        cold = [
            choose(self.logits, Sampling(temperature=0.05), torch.Generator().manual_seed(s))
            for s in range(50)
        ]
        assert set(cold) == {1}
        assert self.drawn() == self.drawn()


@pytest.mark.parametrize("variant", ["mac", "lmm", "window"])
def test_reading_in_any_pieces_is_reading_at_once(variant, monkeypatch):
    """To the last bit: calls are cut at fixed positions of the document, whatever pieces the text comes in."""
    monkeypatch.setattr("remanence.inference.reader.PIECE", 32)
    subject = bytes_model(variant)
    one, other = Session(subject), Session(subject)
    first = one.read(TEXT * 3)
    second = other.read(iter([TEXT[:50], TEXT[50:], (TEXT * 2)[:33].encode(), (TEXT * 2)[33:]]))
    assert first.tokens == second.tokens == one.tokens == len((TEXT * 3).encode())
    assert_close(one.state, other.state, 0.0)
    assert (first.surprise is None) == (variant == "window")
    if first.surprise is not None:
        whole = subject.trace(torch.tensor([list((TEXT * 3).encode())]))
        assert first.surprise == pytest.approx(whole.surprise.mean().item(), rel=1e-5)


@pytest.mark.parametrize("lengths", [(31, 70), (33, 2), (64, 200), (1, 129)])
def test_long_prompts_side_by_side_take_few_calls(lengths, monkeypatch):
    monkeypatch.setattr("remanence.inference.reader.PIECE", 32)
    subject, calls = bytes_model("lmm", torch.float64), []
    prompts = [(TEXT * 3)[:n] for n in lengths]
    trace = Model.trace
    monkeypatch.setattr(
        Model, "trace", lambda self, tokens, *a, **k: calls.append(1) or trace(self, tokens, *a, **k)
    )
    together = Generation(subject, prompts, Sampling(temperature=0.0, max_tokens=2)).run()
    assert len(calls) <= 2 * (max(lengths) // 32 + 1) + 2 * 2
    for row, prompt in enumerate(prompts):
        assert (
            together.tokens[row]
            == Generation(subject, [prompt], Sampling(temperature=0.0, max_tokens=2)).run().tokens[0]
        )


def unfinished():
    session = Session(bytes_model())
    stream = session.stream("abc", max_tokens=50)
    next(stream)
    return session, stream


@pytest.mark.parametrize("call", [
    lambda session, path: session.read(TEXT),
    lambda session, path: session.read(""),
    lambda session, path: list(session.read_pieces(TEXT)),
    lambda session, path: session.generate("d", max_tokens=2),
    lambda session, path: next(session.stream("d", max_tokens=2)),
    lambda session, path: session.load(path),
    lambda session, path: setattr(session, "state", session.model.start(1)),
])  # fmt: skip
def test_what_an_unfinished_stream_would_undo_is_refused(tmp_path, call):
    session, stream = unfinished()
    session.save(tmp_path / "a.mem")
    before = session.tokens
    with pytest.raises(
        ValueError, match=r"^\w+: expected no answer under way, .*finish its loop, or end it with"
    ):
        call(session, tmp_path / "a.mem")
    assert session.tokens == before
    next(stream)
    assert session.tokens > before
    stream.close()
    call(session, tmp_path / "a.mem")


def test_save_and_fork_take_what_has_come_so_far(tmp_path):
    session, stream = unfinished()
    so_far, fork = session.tokens, session.fork()
    session.save(tmp_path / "a.mem")
    next(stream)
    assert fork.tokens == so_far == Session(session.model).load(tmp_path / "a.mem").tokens < session.tokens
    fork.read(TEXT)
    assert fork.tokens == so_far + len(TEXT.encode())
    said = len(list(stream))
    assert said and session.read("more").tokens == 4


def test_a_stream_that_has_not_begun_waits_for_nothing():
    session = Session(bytes_model())
    stream = session.stream("abc", max_tokens=2)
    session.read(TEXT)
    list(stream)
    assert session.tokens == len(TEXT.encode()) + 5


def test_a_stream_that_fails_leaves_the_session_free():
    session = Session(bytes_model())
    with pytest.raises(ValueError, match="max_tokens"):
        session.generate("a", max_tokens=-1)
    with torch.no_grad():
        session.model.backbone.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite logits"):
        session.generate("a")
    assert session.read("abc").tokens == 3


def test_a_loaded_model_has_its_tokenizer(tmp_path):
    tokenizer = pairs_tokenizer(tmp_path / "pairs.json")
    model("mac", torch.float32, vocab_size=600).save(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    for subject in (loaded, tmp_path / "model"):
        session = Session(subject)
        assert session.tokenizer.vocabulary == 258
        assert session.read("memme").tokens == 3
    assert Generation(loaded, ["me"]).prompts == [[256]]
    assert Session(loaded, ByteTokenizer()).read("me").tokens == 2


def test_a_large_vocabulary_is_not_taken_for_bytes(tmp_path):
    large = model("mac", torch.float32, vocab_size=2000)
    large.save(tmp_path / "model")
    for subject in (large, Model.load(tmp_path / "model"), tmp_path / "model"):
        with pytest.raises(
            ValueError, match=r"^tokenizer: expected one for the model's 2,000 tokens, got none"
        ):
            Session(subject)
    with pytest.raises(ValueError, match="tokenizer: expected one for the model's 2,000 tokens"):
        Generation(large, ["a"])
    assert Session(large, ByteTokenizer()).read("abc").tokens == 3
    assert Session(model("mac", torch.float32, vocab_size=512)).read("abc").tokens == 3


def test_a_generation_runs_once_and_damaged_weights_are_told():
    subject = bytes_model("window")
    generation = Generation(subject, ["a"], Sampling(temperature=0.0, max_tokens=1)).run()
    with pytest.raises(ValueError, match="generation: expected to be run once"):
        generation.run()
    with torch.no_grad():
        subject.backbone.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="model: expected finite logits, got infinite or NaN ones"):
        Session(subject).generate("a")


def test_what_generating_may_write():
    subject = bytes_model()
    written = {}
    for write in ("all", "prompt", "none"):
        session = Session(subject, write=write)
        session.read(TEXT)
        before = memories(session.state)[0].position.item()
        session.generate("And then", max_tokens=7, seed=1)  # no end of text among the tokens
        written[write] = memories(session.state)[0].position.item() - before
        assert session.tokens == len(TEXT.encode()) + 15
    assert written == {"all": 15, "prompt": 8, "none": 0}


def test_a_fork_goes_its_own_way():
    session = Session(bytes_model())
    session.read(TEXT)
    before = session.state.clone()
    fork = session.fork()
    fork.read("something else")
    fork.generate("and", max_tokens=3)
    assert_close(session.state, before, 0.0)
    assert session.fork().generate("and", max_tokens=9, seed=1) == session.generate(
        "and", max_tokens=9, seed=1
    )


def test_leaving_a_stream_early_keeps_what_was_said():
    session = Session(bytes_model())
    stream = session.stream("abc", max_tokens=50)
    for _ in range(4):
        next(stream)
    stream.close()
    assert 3 + 4 <= session.tokens < 53


def test_nothing_is_computed_that_needs_a_gradient():
    session = Session(bytes_model())
    session.read(TEXT)
    session.generate("a", max_tokens=2)
    assert not any(tensor.requires_grad for tensor in session.state.tensors())


def test_a_diverged_memory_is_not_used():
    subject = bytes_model("lmm", num_layers=1)
    with torch.no_grad():
        subject.blocks[0].mixer.memory.layer.v_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="memory: expected finite numbers, got a memory that diverged"):
        Session(subject).read(TEXT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.generate(""), "prompt: expected a text of at least one character, got an empty one"),
        (lambda s: s.generate("a", temperature=-1), "temperature: expected a number of at least 0, got -1"),
        (lambda s: s.generate("a", top_k=0), "top_k: expected an integer of at least 1, got 0"),
        (lambda s: s.generate("a", top_p=1.5), "top_p: expected a number above 0 and up to 1, got 1.5"),
        (lambda s: s.generate("a", stop=[""]), r"stop: expected texts of at least one character, got \[''\]"),
        (lambda s: s.generate("a", seed=10**30), r"seed: expected an integer from 0 to 2\^62, or"),
        (
            lambda s: s.generate("a", no_repeat=-1),
            "no_repeat: expected an integer of at least 0, or None, got -1",
        ),
        (
            lambda s: s.generate("a", max_tokens=-1),
            "max_tokens: expected an integer of at least 0, got -1",
        ),
        (lambda s: Session(s.model, write="some"), "write: expected one of all, prompt, none, got 'some'"),
        (lambda s: Session(model()), "tokenizer: expected at most the model's 11 tokens, got 257"),
        (lambda s: Generation(s.model, []), "prompts: expected texts"),
        (lambda s: Generation(s.model, "abc"), "prompts: expected texts"),
        (
            lambda s: Generation(s.model, ["a", "b"], state=s.model.start(3)),
            "state: expected one row, or one for each of 2",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(Session(bytes_model()))


class TestTokenizers:
    def test_bytes_and_their_json_agree(self, tmp_path):
        ByteTokenizer().save(tmp_path)
        assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
        other = JsonTokenizer(tmp_path / "tokenizer.json", "<|end|>")
        text = "".join(chr(code) for code in range(1, 400)) + "🎉 \r\n\t"
        assert other.encode(text) == ByteTokenizer().encode(text)
        assert other.decode(other.encode(text)) == ByteTokenizer().decode(other.encode(text)) == text
        assert (other.vocabulary, other.end) == (257, 256)

    def test_a_json_tokenizer_streams_what_it_encodes_at_once(self, tmp_path, monkeypatch):
        from tokenizers import Tokenizer, models, pre_tokenizers

        monkeypatch.setattr("remanence.tokenizers.tokens.PIECE", 16)
        inner = Tokenizer(
            models.WordLevel({"[UNK]": 0, "Call": 1, "me": 2, "Ishmael": 3, "ago": 4}, unk_token="[UNK]")
        )
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        inner.save(str(tmp_path / "tokenizer.json"))
        own = load_tokenizer(tmp_path)
        whole = own.encode(TEXT)
        for size in (1, 3, 7, 100):
            pieces = [TEXT.encode()[i : i + size] for i in range(0, len(TEXT.encode()), size)]
            assert [token for tokens in own.stream(pieces) for token in tokens] == whole

    def test_saved_beside_the_model_it_comes_back(self, tmp_path):
        subject = Model(preset("tiny", "lmm"))
        subject.save(tmp_path)
        ByteTokenizer().save(tmp_path)
        session = Session(tmp_path)
        assert isinstance(session.tokenizer, ByteTokenizer)
        assert session.generate("a", max_tokens=5, seed=1) == Session(subject).generate(
            "a", max_tokens=5, seed=1
        )

    def test_a_broken_tokenizer_is_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
            load_tokenizer(tmp_path)
        assert byte_level_json() != {}
