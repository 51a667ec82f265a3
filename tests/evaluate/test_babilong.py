"""Facts are in order and once in texts of exactly so many tokens; answers are judged as BABILong judges them."""

import json
import random
import tarfile

import pytest
import torch
from evaluations import measured, saved, telling

from remanence.evaluate import TASKS, Subject, configured
from remanence.tasks.babilong import Story, find_file, is_right, parse_stories, read_stories
from remanence.tokenizers.tokens import ByteTokenizer

PLACES = ("hallway", "kitchen", "garden", "office")


def babi(stories, chance):
    lines = []
    for _ in range(stories):
        where, number = {}, 0
        for _ in range(3):
            for _ in range(2):
                number += 1
                name, place = chance.choice(("Mary", "John", "Daniel")), chance.choice(PLACES)
                where[name] = place
                lines.append(f"{number} {name} went to the {place}.")
            number += 1
            lines.append(f"{number} Where is {name}? \t{where[name]}\t1")
    return "\n".join(lines) + "\n"


@pytest.fixture
def home(tmp_path):
    chance = random.Random(5)
    for folder in ("en", "en-10k"):
        (tmp_path / "babi" / folder).mkdir(parents=True)
        for split in ("train", "test"):
            for task in ("qa1_single-supporting-fact", "qa10_indefinite-knowledge", "qa2_two"):
                (tmp_path / "babi" / folder / f"{task}_{split}.txt").write_text(babi(20, chance))
    book = "".join(f"It was the {number}th day of the long journey over the sea. " for number in range(400))
    (tmp_path / "book.txt").write_text(book)
    return saved(tmp_path)


def babilong(home, **settings):
    subject = Subject.load(home, torch.device("cpu"))
    return TASKS["babilong"](subject, configured(TASKS["babilong"], given(home, **settings)))


def given(home, **settings):
    own = {
        "data": str(home / "babi"),
        "books": str(home / "book.txt"),
        "tasks": "qa1,qa2",
        "lengths": "0,1K",
        "samples": "3",
    }
    return {**own, **settings}


def test_stories_by_hand():
    text = "1 A went.\n2 B came.\n3 Where is A? \tthere\t1\n4 C sat.\n5 What has C?\tapple,milk\t4\n1 D ran.\n2 Who? \tD\t1\n"  # noqa: E501
    assert list(parse_stories(text)) == [
        Story(["A went.", "B came."], "Where is A?", "there"),
        Story(["A went.", "B came.", "C sat."], "What has C?", "apple,milk"),
        Story(["D ran."], "Who?", "D"),
    ]


@pytest.mark.parametrize("shots", [0, 2])
def test_every_text_is_as_asked(home, shots):
    task, tokenizer = babilong(home, lengths="0,1K,3000", shots=str(shots)), ByteTokenizer()
    for unit in [unit for group in task.units() for unit in group]:
        tokens, prompt, story = task.sample(unit)
        text = tokenizer.decode(tokens.tolist())
        if unit["length"]:
            assert len(tokens) + len(tokenizer.encode(prompt)) == unit["length"]
        assert text.count("Answer:") == shots and text.endswith(f"\nQuestion: {story.question}")
        rest = text.rsplit("\n\n", 1)[-1]
        place = 0
        for fact in story.facts:
            place = rest.index(fact, place) + len(fact)
        assert len([part for part in rest.split(".") if " went to the " in part]) == len(story.facts), (
            "each fact is told once"
        )
    units = task.units()
    asked = [[task.sample(unit)[2] for unit in group] for group in units]
    assert asked[0] == asked[1] == asked[2] != asked[3], "every length asks the same stories"
    assert len({id(story) for story in asked[0]}) == 3


def test_a_file_names_the_stories_that_are_asked(home):
    (home / "chosen.json").write_text('{"qa1": [7, 2, 30], "qa2": [0, 1, 59]}')
    task = babilong(home, indices=str(home / "chosen.json"), lengths="0")
    for group, chosen in zip(task.units(), ({7, 2, 30}, {0, 1, 59}), strict=True):
        known = read_stories("data", str(home / "babi"), group[0]["qa"], "test")
        asked = [task.sample(unit)[2] for unit in group]
        assert sorted(asked) == sorted(known[index] for index in chosen)
    assert task.identity != babilong(home, lengths="0").identity


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('{"qa1": [1]}', "numbers of stories below 60 for qa2, got others, or none"),
        ('{"qa1": [60], "qa2": [0]}', "numbers of stories below 60 for qa1, got others"),
        ('{"qa1": [true], "qa2": [0]}', "numbers of stories below 60 for qa1, got others"),
        (None, "a JSON file, got .*chosen.json, which does not exist"),
    ],
)
def test_indices_that_name_no_story_are_refused(home, told, message):
    if told is not None:
        (home / "chosen.json").write_text(told)
    with pytest.raises(ValueError, match=f"babilong.indices: expected {message}"):
        babilong(home, indices=str(home / "chosen.json"))


def test_a_text_does_not_depend_on_the_other_lengths(home):
    alone, beside = (babilong(home, lengths=lengths) for lengths in ("1K", "0,1K,3000"))
    for unit in [unit for group in alone.units() for unit in group]:
        (a, *_), (b, *_) = alone.sample(unit), beside.sample(unit)
        assert a.tolist() == b.tolist()


def test_answers_are_judged_by_hand():
    options = ["garden", "kitchen", "hallway"]
    story = Story([], "Where is Mary?", "garden")
    for said, right in (
        (" garden", True),
        (" The Garden. Then the kitchen.", True),
        (" garden\nQuestion: and the kitchen?", True),
        (" the garden or the kitchen", False),
        (" kitchen", False),
        (" gardener", False),
        ("", False),
    ):
        assert is_right(story, said, options, ordered=False) is right, said
    moved = Story([], "Where was the apple before the kitchen?", "garden")
    assert is_right(moved, " before the kitchen it was in the garden", options, ordered=False)
    carried = Story([], "What is Mary carrying?", "apple,milk")
    assert is_right(carried, " milk,apple", ["apple,milk", "nothing"], ordered=False)
    assert not is_right(carried, " apple", ["apple,milk", "nothing"], ordered=False)
    path = Story([], "How do you go?", "s,e")
    assert is_right(path, " s,e", ["s,e", "n,w"], ordered=True)
    assert not is_right(path, " e,s", ["s,e", "n,w"], ordered=True)
    twice = Story([], "How do you go?", "s,s")
    assert is_right(twice, " s,s", ["s,s", "n,w"], ordered=True)
    assert not is_right(twice, " s", ["s,s", "n,w"], ordered=True)


def test_right_answers_score_100_wrong_ones_0_and_guesses_chance(home):
    rows = measured(
        home, "babilong", subject=telling(home, lambda text, options: (options[0], 0)), **given(home)
    )
    assert {row.value for row in rows} == {1.0}
    rows = measured(
        home, "babilong", subject=telling(home, lambda text, options: (options[1], 1)), **given(home)
    )
    assert {row.value for row in rows} == {0.0}
    chance = random.Random(1)
    guess = telling(home, lambda text, options: ("", chance.randrange(len(options))))
    rows = measured(home, "babilong", subject=guess, **given(home, tasks="qa1", lengths="0", samples="60"))
    low, high = rows.row("chosen", qa="qa1").interval
    assert low < 1 / rows.row("chosen", qa="qa1").setting["options"] < high


def test_the_mean_is_over_tasks_and_the_plot_has_the_papers_points(home, tmp_path):
    rows = measured(
        home,
        "babilong",
        subject=telling(home, lambda text, own: (own[text.count("sea") > 9], 0)),
        **given(home),
    )
    assert (
        rows.value("right", qa="mean", length=0) == 1.0 and rows.value("right", qa="mean", length=1024) == 0.0
    )
    (path,) = babilong(home).plots({"on": rows, "off": rows}, tmp_path / "r")
    assert path.name == "r.babilong.png" and path.read_bytes().startswith(b"\x89PNG")
    assert not any("fine_tuned" in row.setting for row in rows)
    said = measured(
        home,
        "babilong",
        subject=telling(home, lambda text, own: ("", 0)),
        **given(home, published="fine-tuned"),
    )
    assert all(row.setting["fine_tuned"] for row in said)
    (home / "trained.json").write_text('{"data": "babilong"}')
    known = measured(home, "babilong", subject=telling(home, lambda text, own: ("", 0)), **given(home))
    assert all(row.setting["fine_tuned"] for row in known), "its training says so"


def test_a_model_runs_through_it(home):
    one, many = (
        measured(home, "babilong", **given(home, tasks="qa1", samples="2", batch=batch))
        for batch in ("1", "2")
    )
    assert one == many


def test_an_archive_is_a_folder_and_en_comes_first(home):
    with tarfile.open(home / "babi.tar.xz", "w:xz") as archive:
        archive.add(home / "babi", "tasks")
    for task, split in (("qa1", "test"), ("qa10", "train")):
        text = next((home / "babi" / "en").glob(f"{task}_*_{split}.txt")).read_text()
        assert (
            find_file("data", home / "babi", task, split)
            == find_file("data", home / "babi.tar.xz", task, split)
            == text
        )


@pytest.mark.slow
def test_the_hub_s_stories_are_the_archive_s(home, tmp_path):
    """In BABILong's layout: a configuration for each length, of which 0k has the facts alone, and a split for each
    task.
    """
    pytest.importorskip("datasets")
    source = tmp_path / "hub"
    (source / "0k").mkdir(parents=True)
    for task in ("qa1", "qa2"):
        found = read_stories("data", str(home / "babi"), task, "test")
        rows = [
            {"input": " ".join(one.facts), "question": one.question, "target": one.answer} for one in found
        ]
        (source / "0k" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = "".join(f"      - split: {task}\n        path: 0k/{task}.jsonl\n" for task in ("qa1", "qa2"))
    (source / "README.md").write_text(f"---\nconfigs:\n  - config_name: 0k\n    data_files:\n{splits}---\n")
    assert read_stories("data", f"hf:{source}", "qa2", "test") == read_stories(
        "data", str(home / "babi"), "qa2", "test"
    )
    there, here = (
        measured(home, "babilong", **given(home, data=data, samples="1"))
        for data in (f"hf:{source}", str(home / "babi"))
    )
    assert [row.value for row in there] == [row.value for row in here]
    with pytest.raises(ValueError, match="shots: expected 0 with a dataset of the hub"):
        babilong(home, data=f"hf:{source}", shots="1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": "none"},
            "babilong.data: expected bAbI's folder or archive, or hf:NAME, got none; it can be found at https",
        ),
        ({"data": "nowhere"}, "babilong.data: expected bAbI's folder or archive, or hf:NAME, got nowhere"),
        ({"tasks": "qa3"}, "babilong.data: expected qa3_..._test.txt in"),
        ({"tasks": "qa21"}, "babilong.tasks: expected one of qa1"),
        ({"books": "none"}, "babilong.books: expected a text to hide facts in"),
        (
            {"lengths": "0", "samples": "61"},
            "babilong.samples: expected at most 60 samples of qa1, which has no more stories, got",
        ),
        ({"lengths": "1M"}, "babilong.books: expected a text of at least 1,048,576 tokens"),
        (
            {"lengths": "40"},
            "babilong.samples: expected at most 0 samples of qa1, whose other stories have no room in 40 tokens",
        ),
    ],
)
def test_what_cannot_be_is_one_line(home, settings, message):
    with pytest.raises(ValueError, match=message):
        babilong(home, **settings)
