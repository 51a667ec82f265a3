"""Facts planted in books: every question follows its fact, and steps are made again on any number of processes."""

import json
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from remanence.config import preset
from remanence.data import Tokens, prepare
from remanence.io.migrations import first_fields
from remanence.model import Model, parameters
from remanence.recipes.facts import recipe
from remanence.tasks.facts import BARE, FIRST, Facts
from remanence.tasks.needle import ADJECTIVES, NOUNS
from remanence.train import DataConfig, FactsData, OptimizerConfig, TrainConfig, fit
from remanence.train.config import override
from remanence.train.engine import make_optimizer, take_step

NAME = rf"({'|'.join(ADJECTIVES)})[- ]({'|'.join(NOUNS)})"


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    chance = random.Random(0)
    words = ["the", "rain", "fell", "on", "a", "hill", "and", "nobody", "came", "by", "until", "evening"]
    for book in range(3):
        text = "".join(" ".join(chance.choices(words, k=9)).capitalize() + ". " for _ in range(3000))
        (folder / f"{book}.txt").write_text(text)
    prepare(sorted(folder.glob("*.txt")), folder / "tokens")
    return Tokens(folder / "tokens")


def streams(source, row, steps):
    """The texts of a row's streams, as far as so many steps read them, and which of their bytes are answers."""
    found = []
    for step in range(steps):
        tokens, answers, begins = source.piece(row, step)
        if begins:
            found.append((b"", []))
        text, marks = found.pop()
        found.append((text + bytes(tokens[:-1].tolist()), marks + answers[:-1].tolist()))
    return [(text.decode(), marks) for text, marks in found]


def answers_in(text, marks):
    """Each answer of a stream: its question, which is what stands before it, and its value."""
    for begin in range(1, len(marks)):
        if marks[begin] and not marks[begin - 1]:
            end = marks.index(False, begin) if False in marks[begin:] else len(marks)
            if end < len(marks):  # the stream's last answer may be cut
                yield begin, text[begin:end].strip(" .")


@pytest.mark.parametrize(("ramp", "least"), [(0, 10), (100, 100)])
def test_what_is_asked_was_told_before_in_the_same_stream(books, ramp, least):
    """In every wording: the name in front of an answer stood before, last of all with that value behind it."""
    source, asked = Facts(books, 1024, 2, 0.1, ramp, seed=3), 0
    for text, marks in streams(source, 1, 200):
        lower = text.lower()
        for place, value in answers_in(text, marks):
            *_, name = re.finditer(NAME, lower[max(0, place - 80) : place])
            start = max(0, place - 80) + name.start()
            told = rf"{name[1]}[- ]{name[2]}(?:: | is:? | has the number )(\d+)\."
            # RULER's question names what it asks for twice.
            before = [match[1] for match in re.finditer(told, lower[:start])]
            assert before and before[-1] == value
            asked += 1
    assert asked > least


def test_only_answers_count_in_full(books):
    batch = Facts(books, 2048, 4, 0.25, seed=1).step(0)
    weights = batch.weights
    assert set(weights.unique().tolist()) == {0.25, 1.0}
    for row in range(4):
        answers = bytes(batch.targets[row][weights[row] == 1].tolist()).decode()
        assert re.fullmatch(r"( \d{1,7}\.)*", answers)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    alone = Facts(books, 2048, 4, 0.0, seed=1).step(0)
    assert torch.equal(alone.targets >= 0, weights == 1), "with weight 0, nothing but answers is a target"


def test_where_a_number_ends_has_to_be_known(books):
    """Answers have one to seven digits, and the token after the last counts as much as the digits. Only the weights
    differ from those of earlier versions: the texts are the same.
    """
    source, before = (
        Facts(books, 1024, 8, 0.1, 50, seed=1),
        Facts(books, 1024, 8, 0.1, 50, seed=1, answer_end=False),
    )
    lengths = set()
    for step in range(4):
        now, then = source.step(step), before.step(step)
        assert torch.equal(now.tokens, then.tokens)
        more = (now.weights == 1) & (then.weights < 1)
        assert more.any() and bytes(now.targets[more].tolist()) == b"." * int(more.sum())
        answers = bytes(now.targets[now.weights == 1].tolist()).decode()
        assert answers.count(".") == answers.count(" ")
        lengths |= {len(value) for value in re.findall(r"\d+", answers)}
    assert lengths == set(range(1, 8))


def test_a_run_of_an_earlier_version_is_resumed_as_it_was(books, tmp_path, recwarn):
    """Its config has no `data.answer_end`: the end of an answer goes on counting as text, and nothing is reported as
    changed.
    """
    model = preset("tiny", "lmm", dim=32, num_layers=1, memory={"heads": 1})
    data = DataConfig(kind="facts", path=str(books.folder), length=512, weight=0.5, answer_end=False)
    config = TrainConfig(
        model=model, data=data, steps=4, batch=2, carry=True, device="cpu", save_every=2, log_every=1
    )
    assert "answer_end" not in config.to_dict()["data"] and TrainConfig.from_dict(config.to_dict()) == config
    whole, half = [], []
    fit(config, tmp_path / "whole", log=whole.append)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "model")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "00000004")
    run = TrainConfig.from_dict(json.loads((tmp_path / "half" / "config.json").read_text()))
    fit(run, tmp_path / "half", resume=True, log=half.append)
    assert [line["loss"] for line in half] == [line["loss"] for line in whole[2:]]
    assert not [each for each in recwarn if "changed" in str(each.message)]
    now = replace(config, data=replace(data, answer_end=True))
    assert now.to_dict()["data"]["answer_end"] is True and TrainConfig.from_dict(now.to_dict()) == now
    assert override(TrainConfig(), {"data.kind": "facts", "data.path": "x"}).data.answer_end
    assert "answer_end" not in TrainConfig().to_dict()["data"]


def test_old_names_of_fields_are_read():
    """In calls with a warning; in files and on the command line without one."""
    now = FactsData(distance_ramp=30, answer_end=False)
    with pytest.warns(DeprecationWarning, match="ramp is deprecated: use distance_ramp"):
        assert DataConfig(kind="facts", ramp=30, answer_end=False) == now
    with pytest.warns(DeprecationWarning, match="ends is deprecated: use answer_end"):
        assert replace(now, ends=True).answer_end
    with pytest.warns(DeprecationWarning, match="ramp is deprecated"):
        assert now.ramp == 30
    assert override(TrainConfig(data=FactsData()), {"data.ramp": "30", "data.ends": "false"}).data == now
    saved = {**now.to_dict(), "ramp": 30}
    assert DataConfig.from_dict({name: saved[name] for name in saved if name != "distance_ramp"}) == now
    assert DataConfig.from_dict({"kind": "facts", "ends": True}).answer_end
    other = DataConfig.from_dict(
        {"kind": "needle", "ramp": 0, "ends": True}
    )  # files once had every kind's fields
    assert other == DataConfig(kind="needle")
    first = first_fields("train", TrainConfig(data=replace(now, answer_end=True)).to_dict())["data"]
    assert (first["ramp"], first["ends"]) == (30, True) and "distance_ramp" not in first


def test_steps_are_made_again_and_dealt_to_processes(books):
    one = Facts(books, 1024, 4, 0.1, 20, seed=5)
    kept = [one.step(number) for number in range(30)]
    again = Facts(books, 1024, 4, 0.1, 20, seed=5).step(29)  # without the steps before, as after a resumption
    two = [Facts(books, 1024, 2, 0.1, 20, seed=5, rank=rank, world_size=2).step(29) for rank in range(2)]
    for name in ("tokens", "targets", "begins", "weights"):
        wanted = getattr(kept[29], name)
        assert torch.equal(wanted, getattr(again, name))
        assert torch.equal(wanted, torch.cat([getattr(each, name) for each in two]))
    assert not torch.equal(kept[3].tokens, Facts(books, 1024, 4, 0.1, 20, seed=6).step(3).tokens)


def test_texts_have_numbers_that_belong_to_no_fact(books):
    """As many as facts, and in a sparse stream some all the same; none of them under a name."""
    source, bare, facts, read = Facts(books, 2048, 4, 0.1, seed=7), 0, 0, 0
    for row in range(4):
        for text, _ in streams(source, row, 100):
            numbers = re.findall(r"\d[\d,:]*", text)
            facts += len(re.findall(rf"(?i){NAME}(?:: | is:? | has the number )\d+\.", text))
            under = len(re.findall(rf"(?i){NAME}\D{{0,80}}?\d", text))
            bare, read = bare + len(numbers) - under, read + len(text)
    assert bare > max(0.8 * facts, 0.8 * read / BARE)


def test_a_run_begins_with_many_facts_and_their_questions_near(books):
    source = Facts(books, 4096, 8, 0.1, 1000, seed=0)
    first, grown = source.step(0), Facts(books, 4096, 8, 0.1, seed=0).step(0)
    counts = [int((batch.weights == 1).sum()) for batch in (first, grown)]
    assert counts[0] > 3 * counts[1]
    assert first.begins.all() and source.step(1).begins.all(), "streams of one piece"
    assert counts[0] > first.tokens.numel() / FIRST[0] * 3
    assert float(first.weights.min()) == 0, "the text does not count yet"


def test_wordings_come_in_one_after_the_other(books):
    source = Facts(books, 1024, 8, 0.1, 1000, seed=0)

    def told(step):
        texts = [bytes(source.piece(row, step)[0].tolist()).decode() for row in range(8)]
        return {
            name
            for name, mark in (("direct", ": "), ("repeated", " The number of"), ("ruler", "magic"))
            if any(mark in text for text in texts)
        }

    assert told(0) == {"direct"}
    assert told(60) == {"direct", "repeated"}
    assert told(300) == {"direct", "repeated", "ruler"}


def test_a_run_carries_its_memory_through_streams(books, tmp_path):
    model = preset("tiny", "lmm", dim=32, num_layers=1, memory={"heads": 1})
    data = DataConfig(kind="facts", path=str(books.folder), length=512, weight=0.5)
    config = TrainConfig(
        model=model, data=data, optimizer=OptimizerConfig(warmup=1), steps=4, batch=2, carry=True, device="cpu",
        log_every=1, save_every=2,
    )  # fmt: skip
    lines = []
    fit(config, tmp_path / "run", log=lines.append)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(line["loss"] > 0 for line in lines)


def test_a_weighted_loss_is_the_mean_over_weights(books):
    steps = map(Facts(books, 512, 2, 0.3, seed=2).step, range(32))
    batch = next(step for step in steps if bool((step.weights == 1).any()))
    config = TrainConfig(
        model=preset("tiny", "lmm", dim=32, num_layers=1, memory={"heads": 1}), device="cpu", batch=2
    )
    torch.manual_seed(0)
    model = Model(config.model)
    logits, _ = model(batch.tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.linalg.vector_norm(torch.stack([slope.norm() for slope in slopes]))
    step = take_step(model, make_optimizer(model, config), config, [batch], None, 0)
    assert step.loss == pytest.approx(float(loss), rel=1e-5)
    assert step.gradient == pytest.approx(float(norm), rel=1e-4)
    answers = losses[batch.weights.flatten() == 1]
    assert 0 < len(answers) < len(losses)
    assert step.answers == pytest.approx(float(answers.mean()), rel=1e-5)
    plain = take_step(model, make_optimizer(model, config), config, [batch._replace(weights=None)], None, 0)
    assert plain.answers is None


def test_what_cannot_be_is_refused(books):
    with pytest.raises(ValueError, match="length: expected at least 512 tokens"):
        Facts(books, 256, 1, 0.1)
    with pytest.raises(ValueError, match="data: expected a document of more than 2,000,000 tokens, got none"):
        Facts(books, 1_000_000, 1, 0.1)
    with pytest.raises(ValueError, match="weight: expected a number from 0 to 1, got 2"):
        DataConfig(kind="facts", weight=2.0)
    with pytest.raises(
        ValueError,
        match=r"data.distance_ramp: expected only with data.kind='facts' or 'fact_dialogues', got it with 'needle'",
    ):
        DataConfig(kind="needle", distance_ramp=5)


def test_the_recipe_is_small_enough_to_ship():
    assert 2 * parameters(recipe().model) < 12e6
