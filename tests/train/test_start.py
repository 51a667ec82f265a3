"""A run can begin with a model's weights, and learn BABILong's stories as the evaluation asks them."""

import json
from dataclasses import replace

import pytest
import torch
from runs import config, losses, weights

from remanence import Model
from remanence.data import prepare
from remanence.tasks.babilong import PROMPT, read_stories
from remanence.tokenizers.tokens import ByteTokenizer, load_tokenizer
from remanence.train import DataConfig, OptimizerConfig, fit
from remanence.train.sources import SOURCES

PLACES = ("hallway", "kitchen", "garden", "office")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "babi").mkdir()
    for split, shift in (("train", 0), ("test", 1)):
        told = [
            f"1 Mary went to the {PLACES[(n + shift) % 4]}.\n2 John went to the {PLACES[n // 4 % 4]}.\n"
            f"3 Where is Mary?\t{PLACES[(n + shift) % 4]}\t1\n"
            for n in range(16)
        ]
        (tmp_path / "babi" / f"qa1_one_{split}.txt").write_text("".join(told))
    (tmp_path / "book.txt").write_text(
        "".join(f"It was the {n}th day of the long journey. " for n in range(300))
    )
    return tmp_path


def stories(home, **fields):
    data = DataConfig(
        kind="babilong", path=str(home / "babi"), books=str(home / "book.txt"), tasks=("qa1",), length=256
    )
    return replace(data, **fields)


def test_rows_hold_a_training_story_and_its_answer_is_to_be_told(home):
    source = SOURCES["babilong"](config(data=stories(home)), 6, 0, 1)
    known = read_stories("data", str(home / "babi"), "qa1", "train")
    batch = source.step(3)
    assert batch.tokens.shape == (6, 256)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        text = ByteTokenizer().decode(tokens)
        answer = text.rpartition(PROMPT)[2]
        facts = [f"{part.strip()}." for part in text.split(".") if "went to the" in part]
        assert any(story.facts == facts and f" {story.answer}\n" == answer for story in known)
        asked = [place for place, target in enumerate(targets) if target >= 0]
        assert asked == list(range(256 - len(answer) - 1, 255))
        assert all(targets[place] == tokens[place + 1] for place in asked)
    two = [SOURCES["babilong"](config(data=stories(home)), 3, rank, 2) for rank in range(2)]
    assert torch.equal(batch.tokens, torch.cat([each.step(3).tokens for each in two]))
    assert not torch.equal(batch.tokens, source.step(4).tokens)


def test_a_run_begins_where_another_ended(home, tmp_path):
    prepare([home / "book.txt"], tmp_path / "tokens")
    packed = DataConfig(kind="packed", path=str(tmp_path / "tokens"), length=32)
    fit(config(data=packed, steps=20), tmp_path / "first")
    model = tmp_path / "first" / "model"
    still = OptimizerConfig(lr=1e-12, warmup=1)
    other = config("mac", data=stories(home), optimizer=still, init_from=str(model), steps=1, save_every=1)
    fit(other, tmp_path / "second")
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before), (
        "its shape counts, and its weights"
    )
    assert Model.load(tmp_path / "second" / "model").config.blocks == ("lmm",)
    assert isinstance(load_tokenizer(tmp_path / "second" / "model"), ByteTokenizer)
    assert json.loads((tmp_path / "second" / "model" / "trained.json").read_text())["data"] == "babilong"


def test_a_started_run_goes_on_without_the_weights_it_began_with(home, tmp_path):
    fit(config(data=stories(home), steps=2), tmp_path / "first")
    steady = OptimizerConfig(schedule="constant", warmup=1)
    own = config(
        data=stories(home),
        optimizer=steady,
        init_from=str(tmp_path / "first" / "model"),
        steps=6,
        save_every=2,
    )
    fit(own, tmp_path / "whole")
    fit(replace(own, steps=4), tmp_path / "part")
    (tmp_path / "first" / "model" / "model.safetensors").unlink()
    told = tmp_path / "part" / "config.json"
    told.write_text(told.read_text().replace('"steps": 4', '"steps": 6'))
    fit(None, tmp_path / "part", resume=True)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    (tmp_path / "first" / "model" / "config.json").unlink()  # and with it perhaps the words of the stories
    told.write_text(told.read_text().replace('"steps": 6', '"steps": 8'))
    with pytest.raises(ValueError, match=r"init_from: expected a model's folder, with its config.json, got"):
        fit(None, tmp_path / "part", resume=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"path": None},
            "data.path: expected bAbI's folder or archive, or hf:NAME, got none; it can be found at",
        ),
        (
            {"books": None},
            "data.books: expected a text to hide stories in: a file, a folder or hf:NAME, got none",
        ),
        ({"tasks": ("qa2",)}, r"data.path: expected qa2_..._train.txt in"),
        ({"tasks": ("qa0",)}, "data.tasks: expected one of qa1"),
        ({"tasks": ()}, "data.tasks: expected at least one, got none"),
        ({"length": 40}, "data.length: expected at least 9[0-9], for the shortest story of qa1, got 40"),
        ({"length": 20_000}, "data.books: expected a text of at least 20,000 tokens"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(home, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        fit(config(data=stories(home, **fields)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_to_begin_with_must_be_one_and_read_the_same_tokens(home, tmp_path):
    with pytest.raises(
        ValueError, match=r"init_from: expected a model's folder, with its config.json, got nowhere"
    ):
        fit(config(init_from="nowhere"), tmp_path / "run")
    tokenizers = pytest.importorskip("tokenizers")
    fit(config(data=stories(home), steps=1), tmp_path / "bytes")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"It": 0, "was": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    prepare([home / "book.txt"], tmp_path / "tokens", tokenizer=tmp_path / "tokenizer.json")
    packed = DataConfig(kind="packed", path=str(tmp_path / "tokens"), length=32)
    with pytest.raises(
        ValueError,
        match=r"init_from: expected data with the tokens of .*, got other ones; prepare it with that",
    ):
        fit(config(data=packed, init_from=str(tmp_path / "bytes" / "model")), tmp_path / "run")


def test_what_is_rare_stays_what_the_first_corpus_told(home, tmp_path):
    own = config("knn", data=stories(home), steps=1)
    own = replace(own, model=replace(own.model, knn=replace(own.model.knn, write="rare", size=16, k=4)))
    fit(own, tmp_path / "first")
    fit(
        replace(own, data=stories(home, length=200), init_from=str(tmp_path / "first" / "model")),
        tmp_path / "second",
    )
    before, after = (weights(tmp_path / name)["log_unigrams"] for name in ("first", "second"))
    assert torch.equal(before, after) and len(before.unique()) > 5
