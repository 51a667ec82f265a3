"""Small evaluations for the tests: a saved model, and the rows of a task on it, found by what they tell."""

from pathlib import Path

import torch
from models import model

from remanence.evaluate import TASKS, Subject, configured, evaluate
from remanence.evaluate.subject import Answer, Likelihood
from remanence.tokenizers.tokens import ByteTokenizer


def saved(folder, variant="mac", **fields):
    quick = {"vocab_size": 257, "window": 32, "segment": 64, "memory": {"chunk": 16}}
    model(variant, torch.float32, **{**quick, **fields}).save(folder)
    ByteTokenizer().save(folder)
    return folder


class Rows(list):
    model = None

    def row(self, metric, **setting):
        found = [row for row in self if row.metric == metric and setting.items() <= row.setting.items()]
        assert len(found) == 1, f"{len(found)} rows {metric} {setting}"
        return found[0]

    def value(self, metric, **setting):
        return self.row(metric, **setting).value


def measured(folder, name, modes=("on",), journal=None, seed=0, subject=None, **settings):
    subject = subject or Subject.load(Path(folder), torch.device("cpu"), seed=seed)
    task = TASKS[name](subject, configured(TASKS[name], settings))
    rows = Rows(evaluate(subject, [task], modes, journal=journal))
    rows.model = subject.network
    return rows


class FactDialogues(Subject):
    """A subject that does not read: `answer`, given a text and its options, says something and prefers one of them."""

    answer = staticmethod(lambda text, options: ("", 0))

    def answers(self, texts, prompts, options, max_tokens):
        found = []
        for tokens, prompt, own in zip(texts, prompts, options, strict=True):
            said, best = self.answer(self.tokenizer.decode(tokens.tolist()) + prompt, own)
            found.append(
                Answer(
                    said, [Likelihood(-float(number != best), number == best) for number in range(len(own))]
                )
            )
        return found


def telling(folder, answer):
    subject = FactDialogues.load(Path(folder), torch.device("cpu"))
    subject.answer = answer
    return subject
