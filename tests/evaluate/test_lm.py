"""Perplexities equal a plain loop, a stream equals windows where it must, and the harness's definitions give its
numbers.
"""

import json
import math
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from evaluations import measured, saved

from remanence.data import sources
from remanence.evaluate import TASKS, Subject, configured
from remanence.evaluate import wikitext_lambada as words
from remanence.evaluate.lm import num_bytes
from remanence.evaluate.wikitext_lambada import harness_windows
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, byte_level_json

TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. Grüße! " * 5


@pytest.fixture
def home(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "A short one."}) + "\n" + json.dumps({"text": None}) + "\n"
    )
    return saved(tmp_path, "mac")


@torch.no_grad()
def plain(model, tokens, window=None):
    """The sum of losses, token after token, the memory begun anew before every window."""
    total, state = 0.0, None
    for place, (token, target) in enumerate(pairwise(tokens)):
        if window and place % window == 0:
            state = None
        logits, state = model(torch.tensor([[token]]), state)
        total += float(F.cross_entropy(logits[0], torch.tensor([target])))
    return total


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["mac", "lmm", "attention", "hybrid"])
def test_perplexity_is_that_of_a_plain_loop(tmp_path, variant):
    home = saved(tmp_path, variant)
    (home / "a.txt").write_text(TEXT)
    rows = measured(home, "lm", data=str(home / "a.txt"), window="32", max_tokens="75", rows="2")
    tokens = ByteTokenizer().encode(TEXT)[:75]
    for view, window in (("window", 32), ("stream", None)):
        expected = plain(rows.model, tokens, window) / 74
        assert rows.value("perplexity", view=view) == pytest.approx(math.exp(expected), rel=1e-5)
        assert rows.value("bits per byte", view=view) == pytest.approx(expected / math.log(2), rel=1e-5)


def test_a_stream_is_one_long_window(home):
    rows = measured(home, "lm", data=str(home / "a.txt"), window="4096")
    assert rows.value("perplexity", view="window") == pytest.approx(
        rows.value("perplexity", view="stream"), rel=1e-6
    )


def test_positions_add_up_to_the_whole(home):
    rows = measured(home, "lm", data=str(home / "a.txt"), views="stream")
    bins = [row for row in rows if row.metric == "loss by position"]
    assert sum(row.count for row in bins) == len(TEXT.encode()) - 1
    assert [row.setting["from"] for row in bins[:5]] == [1, 2, 3, 4, 6]
    mean = sum(row.value * row.count for row in bins) / sum(row.count for row in bins)
    assert math.exp(mean) == pytest.approx(rows.value("perplexity", view="stream"), rel=1e-9)


def test_documents_begin_anew_and_folders_add_up(home):
    alone = [measured(home, "lm", data=str(home / name), views="stream") for name in ("a.txt", "b.jsonl")]
    (home / "both").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (home / name).rename(home / "both" / name)
    together = measured(home, "lm", data=str(home / "both"), views="stream")
    counts = [rows.row("perplexity").count for rows in alone]
    nll = sum(math.log(rows.value("perplexity")) * count for rows, count in zip(alone, counts, strict=True))
    assert together.row("perplexity").count == sum(counts)
    assert together.value("perplexity") == pytest.approx(math.exp(nll / sum(counts)), rel=1e-9)


def test_windows_are_the_harnesss():
    utils = pytest.importorskip("lm_eval.utils")
    for count, window in ((10, 4), (8, 4), (3, 4), (9, 1)):
        tokens = list(range(100, 100 + count))
        theirs = [
            utils.make_disjoint_window(pair) for pair in utils.get_rolling_token_windows(tokens, 7, window, 1)
        ]
        whole = [7, *tokens]
        ours = [(start, first, stop) for start, first, stop in harness_windows(count, window)]
        assert [(whole[start:stop], whole[first + 1 : stop + 1]) for start, first, stop in ours] == [
            (context + end[:-1], end) for context, end in theirs
        ]


PAGES = (
    ' \n = First page = \n \n It was a " small " town ( or so ) , in 1 @,@ 205 , of 3 @.@ 5 km . \n \n'
    " = = Part = = \n \n The Jones ' house 's door . \n \n = Second page = \n \n Another @-@ one ; the end ? Yes ! \n"
)


def test_wikitext_is_the_harnesss(home):
    """The same pages through lm-evaluation-harness's own task code and its Hugging Face model give the same three
    numbers.
    """
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    pytest.importorskip("remanence.hf")
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    from lm_eval.api.instance import Instance

    (home / "wiki.txt").write_text(PAGES)
    pages = words.split_pages(PAGES)
    assert len(pages) == 2 and pages[1].startswith(" = Second page")
    assert [words.detokenize(page) for page in pages] == [
        theirs.wikitext_detokenizer({"page": page}) for page in pages
    ]
    ByteTokenizer().save(home)
    harness = huggingface.HFLM(pretrained=str(home), device="cpu", batch_size=1, max_length=64)
    asked = [
        Instance("loglikelihood_rolling", {}, (theirs.wikitext_detokenizer({"page": page}),), index)
        for index, page in enumerate(pages)
    ]
    logs = harness.loglikelihood_rolling(asked, disable_tqdm=True)
    count = sum(len(re.split(r"\s+", page)) for page in pages)
    rows = measured(home, "wikitext", data=str(home / "wiki.txt"), window="64")
    assert rows.value("word perplexity") == pytest.approx(math.exp(-sum(logs) / count), rel=1e-4)
    size = sum(len(page.encode()) for page in pages)
    assert rows.value("bits per byte") == pytest.approx(-sum(logs) / math.log(2) / size, rel=1e-5)
    assert rows.row("word perplexity").setting["unk"] is False


def test_the_last_word_by_hand(home):
    passages = [{"text": "the cat sat on the mat"}, {"context": "a dog lay on the", "continuation": "rug"}]
    (home / "p.jsonl").write_text("\n".join(json.dumps(passage) for passage in passages))
    rows = measured(home, "lambada", data=str(home / "p.jsonl"), batch="2")
    logs = []
    for context, word in (("the cat sat on the", " mat"), ("a dog lay on the", " rug")):
        tokens = ByteTokenizer().encode(context + word)
        logs.append(-plain(rows.model, tokens) + plain(rows.model, tokens[: -len(word)]))
    assert rows.value("perplexity") == pytest.approx(math.exp(-sum(logs) / 2), rel=1e-4)
    assert rows.value("accuracy") == 0.0 and rows.row("accuracy").count == 2


def test_passages_of_the_hub_are_those_of_a_file(home):
    pytest.importorskip("datasets")
    (home / "hub").mkdir()
    lines = [{"text": f"the cat sat on the {place}"} for place in ("mat", "rug", "bed")]
    (home / "hub" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file, hub = (
        measured(home, "lambada", data=f"{start}{home}/hub{end}")
        for start, end in (("", "/train.jsonl"), ("hf:", ""))
    )
    assert hub.row("accuracy").count == 3 and hub.value("perplexity") == file.value("perplexity")
    assert measured(home, "lambada", data=f"hf:{home}/hub", samples="2").row("accuracy").count == 2


def test_a_batch_of_passages_is_each_alone(home):
    lines = [{"text": "one two three " + "four " * n + "five"} for n in range(5)]
    (home / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    many, one = (measured(home, "lambada", data=str(home / "p.jsonl"), batch=batch) for batch in ("5", "1"))
    assert many.value("perplexity") == pytest.approx(one.value("perplexity"), rel=1e-5)


def test_memory_off_is_a_model_without_one(home):
    rows = measured(home, "lm", modes=("on", "off"), data=str(home / "a.txt"), views="stream")
    rows.model.memory_mode = "off"
    expected = plain(rows.model, ByteTokenizer().encode(TEXT)) / (len(TEXT.encode()) - 1)
    assert rows.value("perplexity", memory="off") == pytest.approx(math.exp(expected), rel=1e-5)
    assert rows.value("perplexity", memory="off") != rows.value("perplexity", memory="on")


def test_pages_cut_inside_a_character_are_read_whole(home, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 1)
    (home / "w.txt").write_text(" = Größe = \n Übermäßig größer \n", encoding="utf-8")
    subject = Subject.load(home, torch.device("cpu"))
    task = TASKS["wikitext"](subject, configured(TASKS["wikitext"], {"data": str(home / "w.txt")}))
    assert "".join(task.pages) == (home / "w.txt").read_text(encoding="utf-8")


def test_parts_of_a_character_count_their_bytes(tmp_path):
    pytest.importorskip("tokenizers")
    plain = byte_level_json()
    plain["added_tokens"] = []
    letters = {number: letter for letter, number in plain["model"]["vocab"].items()}
    plain["model"]["vocab"][letters[ord(" ")] + letters[0xC3]] = 256
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    tokens = list("Grüße, 漢字!".encode())
    for end in range(len(tokens) + 1):
        assert num_bytes(tokenizer, tokens[:end]) == end
    assert (
        num_bytes(tokenizer, [0xE6]) == 1
        and num_bytes(tokenizer, [256]) == 2
        and num_bytes(tokenizer, [256, 0xA9]) == 3
    )
