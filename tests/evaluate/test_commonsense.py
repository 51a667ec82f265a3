"""The harness on local files: lines of either schema ask the same, and its numbers are what the native model says."""

import json
import math

import pytest
import torch
from evaluations import measured, saved

pytest.importorskip("lm_eval")
pytest.importorskip("remanence.hf")

from remanence.evaluate import TASKS, Subject, configured
from remanence.evaluate.commonsense import BENCHMARKS

HUB = {
    "lambada": {"text": "the cat sat on the mat"},
    "piqa": {"goal": "Open a jar.", "sol1": "Turn the lid.", "sol2": "Break it.", "label": 0},
    "hellaswag": {"query": "Cooking: A man stirs. He", "choices": ["eats soup.", "flies away."], "gold": 0},
    "winogrande": {
        "sentence": "The cup fell off the desk as the _ was wet.",
        "option1": "cup",
        "option2": "desk",
        "answer": "2",
    },
    "arc_easy": {
        "question": "What is hot?",
        "choices": {"text": ["Ice", "Fire"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "arc_challenge": {
        "question": "Why?",
        "choices": {"text": ["So", "Not", "Yes"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "boolq": {"passage": "Fish swim.", "question": "do fish swim", "label": 1},
}
FOUNDRY = {
    "lambada": {"context": "the cat sat on the", "continuation": "mat"},
    "piqa": {"query": "Question: Open a jar.\n", "choices": ["Turn the lid.", "Break it."], "gold": 0},
    "hellaswag": {
        "activity_label": "Cooking",
        "ctx_a": "A man [x]stirs.",
        "ctx_b": "he",
        "label": "0",
        "endings": ["eats soup.", "flies  away."],
    },
    "winogrande": {
        "context_options": ["The cup fell off the desk as the cup", "The cup fell off the desk as the desk"],
        "continuation": "was wet.",
        "gold": 1,
    },
    "arc_easy": {"query": "Question: What is hot?", "choices": ["Ice", "Fire"], "gold": 1},
    "arc_challenge": {"query": "Question: Why?", "choices": ["So", "Not", "Yes"], "gold": 2},
    "boolq": {"query": "Passage: Fish swim.\nQuestion: do fish swim?", "choices": ["no", "yes"], "gold": 1},
}
SIQA = {
    "context": "Ann ran.",
    "question": "Why?",
    "answerA": "fun",
    "answerB": "fear",
    "answerC": "sleep",
    "label": "2",
}


@pytest.mark.parametrize("name", HUB)
def test_a_line_asks_the_same_in_either_schema(name):
    assert BENCHMARKS[name].read(HUB[name]) == BENCHMARKS[name].read(FOUNDRY[name])


def test_social_iqa_by_hand():
    read = BENCHMARKS["siqa"].read
    assert read(SIQA) == {"query": "Q: Ann ran. Why?\nA:", "choices": ["fun", "fear", "sleep"], "gold": 1}
    letters = {"query": "Context: x\nChoices:\nA. y\nB. z\nAnswer:", "choices": ["A", "B"], "gold": 0}
    assert read(letters) == letters


@pytest.fixture
def home(tmp_path):
    saved(tmp_path)
    (tmp_path / "data").mkdir()
    for name, entry in {**HUB, "siqa": SIQA}.items():
        (tmp_path / "data" / f"{name}_val.jsonl").write_text(json.dumps(entry) + "\n")
    return tmp_path


@pytest.mark.slow
def test_its_numbers_are_the_native_models(home):
    piqa = [{**HUB["piqa"], "goal": f"Open {n} jars.", "label": n % 2} for n in range(3)]
    (home / "data" / "piqa_val.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in piqa))
    names = ("lambada", "piqa", "winogrande")
    rows = measured(home, "commonsense", ("on", "off"), data=str(home / "data"), benchmarks=",".join(names))
    subject = Subject.load(home, torch.device("cpu"))

    def log(context, end):
        tokens = [list(context.encode()), list(end.encode())]
        return subject.likelihoods(tokens[:1], tokens[1:])[0].log

    for mode in ("on", "off"):
        subject.memory_mode = mode
        right = [
            log(f"Question: {e['goal']}\nAnswer:", f" {e['sol1']}")
            > log(f"Question: {e['goal']}\nAnswer:", f" {e['sol2']}")
            for e in piqa
        ]
        share = sum(first == (entry["label"] == 0) for first, entry in zip(right, piqa, strict=True)) / 3
        assert rows.value("acc", benchmark="piqa", memory=mode) == pytest.approx(share)
        perplexity = math.exp(-log("the cat sat on the", " mat"))
        assert rows.value("perplexity", benchmark="lambada", memory=mode) == pytest.approx(
            perplexity, rel=1e-3
        )
        cup, desk = (log(context, " was wet.") for context in FOUNDRY["winogrande"]["context_options"])
        assert rows.value("acc", benchmark="winogrande", memory=mode) == float(desk > cup)
    on, off = (rows.value("perplexity", benchmark="lambada", memory=mode) for mode in ("on", "off"))
    assert on != off, "the mode reaches the harness's model"


def test_lambada_is_the_same_through_the_harness_and_without_it(home):
    lines = [
        {"text": f"the {animal} sat on the {place}"}
        for animal in ("cat", "dog")
        for place in ("mat", "rug", "bed")
    ]
    (home / "data" / "lambada_val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs = measured(home, "commonsense", data=str(home / "data"), benchmarks="lambada")
    ours = measured(home, "lambada", data=str(home / "data" / "lambada_val.jsonl"))
    assert ours.value("perplexity") == pytest.approx(theirs.value("perplexity"), rel=1e-4)
    assert ours.value("accuracy") == theirs.value("acc")


@pytest.mark.slow
def test_all_together_have_a_mean(home):
    rows = measured(home, "commonsense", data=str(home / "data"))
    shares = [row.value for row in rows if row.metric in ("acc", "acc_norm")]
    assert len(shares) == 8 and rows.value("mean accuracy", benchmark="all") == pytest.approx(sum(shares) / 8)


def test_rows_tell_what_siqa_asks_for(home):
    def asked(**settings):
        task = TASKS["commonsense"](
            Subject.load(home, torch.device("cpu")), configured(TASKS["commonsense"], settings)
        )
        results = [
            (unit, {"count": 1, "acc": 1.0, "acc_norm": 1.0, "perplexity": 1.0}) for (unit,) in task.units()
        ]
        return {row.setting["benchmark"]: row.setting.get("siqa asks") for row in task.rows(results)}

    every = dict.fromkeys(BENCHMARKS)
    words = {**every, "siqa": "answers", "all": "answers"}
    assert asked(data=str(home / "data")) == words == asked(), (
        "a local file with the hub's fields asks what the hub asks"
    )
    (home / "data" / "siqa_val.jsonl").write_text(
        '{"query": "Choices:\\nA. y\\nB. z", "choices": ["A", "B"], "gold": 0}\n'
    )
    assert asked(data=str(home / "data")) == {**every, "siqa": "letters", "all": "letters"}


def test_a_benchmark_is_the_same_whatever_is_asked_beside_it(home):
    def units(names):
        settings = configured(TASKS["commonsense"], {"data": str(home / "data"), "benchmarks": names})
        return [
            unit
            for (unit,) in TASKS["commonsense"](Subject.load(home, torch.device("cpu")), settings).units()
        ]

    alone, beside = units("piqa")[0], units("boolq,piqa")[1]
    assert alone == beside, "it is not measured again"
    (home / "data" / "piqa_val.jsonl").write_text(json.dumps({**HUB["piqa"], "label": 1}) + "\n")
    assert units("piqa")[0] != alone


def test_what_is_missing_is_said(home):
    subject = Subject.load(home, torch.device("cpu"))
    for settings, message in (
        ({"data": "nowhere"}, "commonsense.data: expected a folder of jsonl files, got nowhere"),
        (
            {"data": str(home)},
            "commonsense.data: expected lambada.jsonl in .*got none; without --commonsense.data it comes from",
        ),
        ({"benchmarks": "pika"}, "did you mean 'piqa'"),
    ):
        with pytest.raises(ValueError, match=message):
            TASKS["commonsense"](subject, configured(TASKS["commonsense"], settings))
    (home / "data" / "piqa_val.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="expected the fields of piqa"):
        TASKS["commonsense"](
            subject, configured(TASKS["commonsense"], {"data": str(home / "data"), "benchmarks": "piqa"})
        )


@pytest.mark.parametrize(
    ("name", "entry", "got"),
    [
        ("piqa", {**HUB["piqa"], "label": -1}, "-1"),
        ("piqa", {**FOUNDRY["piqa"], "gold": 2}, "2"),
        ("arc_easy", {**FOUNDRY["arc_easy"], "gold": "1"}, "'1'"),
        ("winogrande", {**HUB["winogrande"], "answer": "0"}, "-1"),
        ("siqa", {**SIQA, "label": "4"}, "3"),
    ],
)
def test_a_right_answer_outside_the_choices_is_refused(home, name, entry, got):
    (home / "data" / f"{name}_val.jsonl").write_text(
        json.dumps({**HUB, "siqa": SIQA}[name]) + "\n" + json.dumps(entry) + "\n"
    )
    subject = Subject.load(home, torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=rf"{name}_val.jsonl: line 2: gold: expected one of \d choices, from 0 on, got {got}$",
    ):
        TASKS["commonsense"](
            subject, configured(TASKS["commonsense"], {"data": str(home / "data"), "benchmarks": name})
        )
