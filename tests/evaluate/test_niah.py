"""Needles are where they should be, once, in texts of exactly so many tokens; right answers score 100, and guesses
chance.
"""

import random
import re

import numpy as np
import pytest
import torch
from evaluations import FactDialogues, measured, saved, telling

from remanence import Model
from remanence.data import sources
from remanence.data.texts import Texts
from remanence.evaluate import TASKS, Subject, configured
from remanence.tasks.answers import Answer, Likelihood
from remanence.tasks.needle import KINDS, Sample, score
from remanence.tokenizers.tokens import ByteTokenizer

NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.")


def prose(sentences=600):
    chance = random.Random(7)
    words = (
        "the",
        "river",
        "went",
        "slowly",
        "over",
        "1815",
        "évening,",
        "house;",
        "nobody",
        "said",
        "that",
        "winter",
    )
    return "".join(
        " ".join(chance.choices(words, k=chance.randint(4, 18))).capitalize() + ".\n"
        for _ in range(sentences)
    )


@pytest.fixture
def home(tmp_path):
    (tmp_path / "hay.txt").write_text(prose())
    return saved(tmp_path)


@pytest.fixture
def bpe(tmp_path, home):
    """A small byte-pair tokenizer of its own, whose tokens are not bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    from remanence.tokenizers.tokens import JsonTokenizer

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([prose(50)], trainer)
    inner.save(str(tmp_path / "bpe.json"))
    return JsonTokenizer(tmp_path / "bpe.json")


def niah(home, tokenizer=None, seed=0, **settings):
    subject = Subject.load(home, torch.device("cpu"), seed=seed)
    subject.tokens = tokenizer or subject.tokens
    settings = {"data": str(home / "hay.txt"), "lengths": "2K", **settings}
    return TASKS["niah"](subject, configured(TASKS["niah"], settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoded", ["bytes", "pairs"])
def test_every_text_is_as_asked(home, request, kind, encoded):
    tokenizer = ByteTokenizer() if encoded == "bytes" else request.getfixturevalue("bpe")
    task = niah(home, tokenizer, kinds=kind, lengths="1500,4K", depths="0,0.3,1", samples="2")
    for unit in [unit for group in task.units() for unit in group]:
        sample = task.sample(unit)
        assert len(sample.text) + len(tokenizer.encode(sample.prompt)) == unit["length"]
        text = tokenizer.decode(sample.text.tolist())
        told = NEEDLE.findall(text)
        assert len(told) == KINDS[kind].keys * KINDS[kind].values
        for value in sample.right:
            assert text.count(value) == 1, "the answer is told once, in its needle"
        assert not any(value in text for value in sample.wrong if value not in dict(told).values())
        assert len({*sample.right, *sample.wrong}) == 10
        asked = re.findall(r"for (.+) mentioned", text.rsplit("\n", 1)[1])[0].replace("and ", "").split(", ")
        assert {value for key, value in told if key in asked} == set(sample.right)
        first = [
            f"for {asked[0]} is: {value}" for value in sample.right if f"for {asked[0]} is: {value}" in text
        ]
        places = [len(tokenizer.encode(text[: text.index(needle)])) for needle in first]
        assert places == sorted(places), "several values of one key are expected in the order of the text"
        assert min(abs(place - unit["depth"] * unit["length"]) for place in places) < 450, (
            "near its depth, between two sentences"
        )


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_depth_is_counted_in_the_hay_and_needles_stand_between_sentences(home, depth):
    task = niah(home, kinds="n", lengths="4K")
    text = ByteTokenizer().decode(task.sample(task._unit("n", 4096, depth, 3)).text.tolist())
    hay = text[text.index("\n") + 1 : text.rindex("\n")]
    place = NEEDLE.search(hay).start()
    assert place == 0 or hay[:place].endswith(". ")
    longest = max(map(len, NEEDLE.sub("", hay).split(". "))) + 2
    assert abs(place - depth * (len(hay) - len(NEEDLE.search(hay).group()))) <= longest


def test_texts_are_a_function_of_the_seed(home):
    first, again, other = (niah(home, kinds="n,w", seed=seed) for seed in (1, 1, 2))
    for group in first.units():
        for unit in group:
            a, b, c = (task.sample(unit) for task in (first, again, other))
            assert np.array_equal(a.text, b.text) and a[1:] == b[1:]
            assert a.right != c.right
    samples = [first.sample(unit).right[0] for unit in first.units()[0]]
    assert len(set(samples)) == len(samples), "every sample is another"


def test_a_text_does_not_depend_on_the_other_lengths(home):
    alone, beside = (niah(home, kinds="pk,n", lengths=lengths) for lengths in ("1K", "1K,4K,8K"))
    for unit in [unit for group in alone.units() for unit in group]:
        a, b = alone.sample(unit), beside.sample(unit)
        assert np.array_equal(a.text, b.text) and a[1:] == b[1:]


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_tokens_are_those_of_the_text(home, bpe, depth):
    """Where hay and needles meet as well: a space belongs to the word behind it."""
    task = niah(home, bpe, kinds="n,multikey", lengths="700,2K")
    for kind, length in (("n", 700), ("multikey", 2048)):
        sample = task.sample(task._unit(kind, length, depth, 1))
        tokens = sample.text.tolist()
        text = bpe.decode(tokens)
        end = len(bpe.encode(text[text.rindex("\n") :]))
        again = bpe.encode(text[: text.rindex("\n")])
        whole = tokens[:-end]
        cut = next(
            (place for place, (a, b) in enumerate(zip(again, whole, strict=False)) if a != b), len(again)
        )
        assert cut >= len(whole) - 3, "but for the last word of the hay, which may be cut"
        assert "  " not in text and "\n " not in text


def test_a_character_cut_in_two_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 7)
    (tmp_path / "a.txt").write_text("Él está aquí. ¿Dónde? Übermäßig größer.", encoding="utf-8")
    found = list(Texts("data", str(tmp_path / "a.txt"), "").sentences())
    assert found == ["Él está aquí.", "¿Dónde?", "Übermäßig größer."]


def test_who_answers_right_scores_100(home):
    right = telling(home, lambda text, options: (f" I think {options[0]}.", 0))
    rows = measured(home, "niah", subject=right, **SMALL(home))
    assert {row.value for row in rows if row.metric in ("said", "likeliest")} == {1.0}

    def best(text, options):
        return options[0], 1  # the likeliest single value is the right one

    single = {**SMALL(home), "kinds": "pk,n,w,multikey"}
    rows = measured(home, "niah", subject=telling(home, best), **single)
    assert {row.value for row in rows if row.metric == "chosen of 10"} == {1.0}
    assert all(row.interval[1] == 1.0 and row.interval[0] < 1 for row in rows if row.metric == "said")


def test_who_never_answers_right_scores_0_and_who_guesses_chance(home):
    rows = measured(home, "niah", subject=telling(home, lambda text, options: ("1234", 5)), **SMALL(home))
    assert {row.value for row in rows if row.metric in ("said", "likeliest")} == {0.0}
    chance = random.Random(3)
    guess = telling(home, lambda text, options: ("", chance.randrange(1, 11)))
    row = measured(home, "niah", subject=guess, kinds="pk", lengths="1K", depths="0.5", samples="300").row(
        "chosen of 10", kind="pk", length=1024, depth=0.5
    )
    assert row.interval[0] < 0.1 < row.interval[1] and row.count == 300 and row.setting["chance"] == 0.1
    rows = measured(home, "niah", subject=guess, **SMALL(home))
    assert rows.row("chosen of 10", kind="multivalue", chance=0.4, depth=0.5)


def SMALL(home):
    kinds = ",".join(KINDS)
    return {"data": str(home / "hay.txt"), "kinds": kinds, "lengths": "1500", "depths": "0.5", "samples": "1"}


def test_an_answer_may_be_as_long_as_in_ruler_whatever_is_asked_beside_it(home, monkeypatch):
    asked = []
    answers = FactDialogues.answers
    monkeypatch.setattr(
        FactDialogues, "answers", lambda self, *given: asked.append(given[-1]) or answers(self, *given)
    )
    measured(home, "niah", subject=telling(home, lambda text, options: ("", 0)), **SMALL(home))
    assert set(asked) == {128}


def test_a_value_with_more_digits_behind_it_is_wrong(home):
    """Said, and as the likeliest text: the number has to end where the right one does."""

    def longer(text, options):
        return f" I think {options[0]}08, and 5{options[0].strip()}.", 0

    rows = measured(
        home, "niah", subject=telling(home, longer), **{**SMALL(home), "kinds": "pk,n,w,multikey"}
    )
    assert {row.value for row in rows if row.metric == "said"} == {0.0}
    sample = Sample(np.zeros(1), "", ["123"], ["456"])
    others = [Likelihood(-1.0, True), Likelihood(-2.0, False)]
    for after, right in (("", 1), (".", 1), (" and", 1), ("4", 0), ("45", 0), ("th", 0)):
        found = score(sample, Answer("123.", [Likelihood(-1.0, True, after), *others]))
        assert (found["said"], found["likeliest"]) == (1.0, right), after
    assert score(sample, Answer("", [Likelihood(-1.0, False, "."), *others]))["likeliest"] == 0


def test_what_a_model_says_after_a_value_is_looked_at(home):
    """`Likelihood.after` is the token that greedy generation gives next."""
    subject = niah(home, data=str(home / "hay.txt")).subject
    prompt = subject.tokenizer.encode("The number is")
    says = subject.generate(["The number is"], None, 4)[0]
    (found,) = subject.likelihoods([prompt], [subject.tokenizer.encode(says[:3])])
    assert found.greedy and found.after == says[3:4]


def test_scores_by_hand():
    likely = [
        Likelihood(log, greedy)
        for log, greedy in ((-9, False), (-3, False), (-5, False), (-4, True), (-7, False))
    ]
    sample = Sample(np.zeros(1), "", ["123", "456"], ["789", "000"])
    result = score(sample, Answer("it is 456, or 12", likely))
    assert (result["said"], result["likeliest"], result["chosen"]) == (0.5, 0.0, 0.5)
    equal = Answer("", [Likelihood(-1.0, False)] * 5)
    assert score(sample, equal)["chosen"] == 0.0, "a model that prefers nothing has not found anything"


@pytest.mark.slow
def test_a_model_is_asked_what_a_plain_loop_asks(home):
    """From reading in pieces, side by side, to the chosen value: the same as token after token."""
    settings = {"data": str(home / "hay.txt"), "kinds": "n", "lengths": "400", "depths": "0", "samples": "2"}
    one, many = (measured(home, "niah", batch=batch, **settings) for batch in ("1", "2"))
    assert one == many
    task = niah(home, **settings)
    unit = task.units()[0][0]
    sample = task.sample(unit)
    (answer,) = task.subject.answers([sample.text], [sample.prompt], [[" " + sample.right[0]]], 5)
    tokens = [*sample.text.tolist(), *ByteTokenizer().encode(sample.prompt)]
    with torch.no_grad():
        logits, state = task.subject.model(torch.tensor([tokens]))
        first, log = state, 0.0
        chances = logits[0, -1].log_softmax(-1)
        for token in ByteTokenizer().encode(" " + sample.right[0]):
            log += float(chances[token])
            logits, state = task.subject.model(torch.tensor([[token]]), state)
            chances = logits[0, -1].log_softmax(-1)
        assert answer.options[0].log == pytest.approx(log, abs=1e-3)
    assert first.position.tolist() == [400]


@pytest.mark.slow
def test_a_needle_costs_its_length_and_little_more(home, monkeypatch):
    """No clock: tokens that pass through the model beside the text itself, which are as many for a text of any
    length.
    """
    (home / "hay.txt").write_text(prose(2000))
    trace, read = Model.trace, []

    def counted(self, tokens, *arguments, **options):
        read.append(tokens.numel())
        return trace(self, tokens, *arguments, **options)

    monkeypatch.setattr(Model, "trace", counted)
    beside = []
    for length in (1024, 4096):
        task = niah(home, kinds="w", lengths=str(length), depths="0.5")
        read.clear()
        task.measure([task._unit("w", length, 0.5, 0)])
        beside.append(sum(read) - length)
    assert max(beside) < 0.05 * 65536 and abs(beside[0] - beside[1]) < 200


def test_the_heat_map_is_drawn(home, tmp_path):
    rows = measured(home, "niah", subject=telling(home, lambda text, options: (options[0], 1)), **SMALL(home))
    task = niah(home, **SMALL(home))
    (path,) = task.plots({"on": rows, "off": rows}, tmp_path / "r")
    assert path.name == "r.niah.png" and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": "none"},
            "niah.data: expected a text to hide needles in: a file, a folder or hf:NAME, got none",
        ),
        ({"lengths": "1M"}, r"niah.data: expected a text of at least 1,048,576 tokens, got \d"),
        ({"lengths": "64"}, r"niah.lengths: expected at least \d+ tokens for the kind"),
        ({"kinds": "multikeys"}, "did you mean 'multikey'?"),
        ({"depths": "0,2"}, "niah.depths: expected numbers from 0 to 1, got 2"),
        ({"depths": "-1"}, "niah.depths: expected at least 0, got -1"),
        ({"lengths": ""}, "niah.lengths: expected at least one, got none"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(home, settings, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        niah(home, **settings)
