"""Recall: scores against texts read by hand, both curves, and what a model that knows, or guesses, comes to."""

import pytest
import torch
from evaluations import Rows, measured, saved
from models import model

from remanence.evaluate import TASKS, Subject, configured, evaluate

SMALL = {
    "keys": "4",
    "noise": "3",
    "pairs": "2",
    "distances": "4,9,40",
    "capacities": "1,4",
    "distance": "12",
    "texts": "5",
}


class Knowing(Subject):
    """Remembers the pairs of every text by itself; `answer` makes what it says of the right value."""

    answer = staticmethod(lambda value: value)

    def read(self, texts):
        self.pairs = [{}, *({} for _ in texts[1:])]
        for pairs, text in zip(self.pairs, texts, strict=True):
            keys = [place for place, token in enumerate(text.tolist()) if token < 4]
            pairs.update({int(text[place]): int(text[place + 1]) for place in keys})
            assert all(4 <= value < 8 for value in pairs.values())
        return self.model.start(len(texts))

    def likeliest(self, tokens, state=None):
        assert len(state.position) == len(tokens)
        each = len(tokens) // len(self.pairs)
        found = [
            [self.answer(self.pairs[row // each].get(token, 0)) for token in line]
            for row, line in enumerate(tokens.tolist())
        ]
        return torch.tensor(found)


def knowing(answer):
    subject = Knowing(torch.device("cpu"), network=model("mac", torch.float32))
    subject.answer = answer
    task = TASKS["recall"](subject, configured(TASKS["recall"], SMALL))
    return Rows(evaluate(subject, [task]))


def test_who_knows_scores_100_who_does_not_0():
    rows = knowing(lambda value: value)
    assert len(rows) == 2 * (3 + 2) and {row.value for row in rows} == {1.0}
    assert rows.row("lookup", curve="capacity", pairs=4).count == 5 * 4
    assert {row.value for row in knowing(lambda value: value + 1)} == {0.0}


def test_who_guesses_a_value_scores_chance():
    chance = torch.Generator().manual_seed(0)
    for row in knowing(lambda value: int(torch.randint(4, 8, (1,), generator=chance))):
        assert row.interval[0] < 0.25 < row.interval[1], row


def test_a_model_answers_what_a_plain_loop_answers(tmp_path):
    home = saved(tmp_path, vocab_size=11)
    (tmp_path / "tokenizer.json").unlink()
    rows = measured(home, "recall", **SMALL)
    from remanence.tasks.recall import Recall

    right = {"all": 0, "one": 0}
    batch = Recall(9 + 4, 5, 2, 2, 2**32, keys=4, noise=3).step(0)
    with torch.no_grad():
        for text in batch.tokens:
            _, state = rows.model(text[None, :9])
            asked = state
            for key, value in text[9:].view(-1, 2).tolist():
                logits, asked = rows.model(torch.tensor([[key]]), asked)
                right["all"] += int(logits.argmax()) == value
                _, asked = rows.model(torch.tensor([[value]]), asked)
                right["one"] += int(rows.model(torch.tensor([[key]]), state)[0].argmax()) == value
    for name, count in right.items():
        assert rows.value({"all": "mqar", "one": "lookup"}[name], curve="distance", distance=9) == count / 10


def test_no_more_states_are_held_than_texts(tmp_path, monkeypatch):
    home = saved(tmp_path, vocab_size=11)
    (tmp_path / "tokenizer.json").unlink()
    likeliest, held = Subject.likeliest, []

    def counted(self, tokens, state=None):
        held.append(len(state.position))
        return likeliest(self, tokens, state)

    monkeypatch.setattr(Subject, "likeliest", counted)
    measured(home, "recall", **SMALL)
    assert set(held) == {5}


def test_both_curves_are_drawn(tmp_path):
    rows = knowing(lambda value: value)
    task = TASKS["recall"](Subject(torch.device("cpu"), network=model()), configured(TASKS["recall"], SMALL))
    paths = task.plots({"on": rows}, tmp_path / "r")
    assert [path.name for path in paths] == ["r.recall-distance.png", "r.recall-capacity.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match=r"recall.capacities: expected at most 4 pairs"):
        configured(TASKS["recall"], {**SMALL, "capacities": "5"})
    with pytest.raises(ValueError, match=r"recall.pairs: expected at most 4 pairs"):
        configured(TASKS["recall"], {**SMALL, "pairs": "5"})
    with pytest.raises(
        ValueError, match=r"recall.keys: expected at most the model's vocabulary of 11, got 80"
    ):
        TASKS["recall"](Subject(torch.device("cpu"), network=model()), configured(TASKS["recall"], {}))
