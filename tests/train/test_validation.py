"""Language models are validated on data that they do not train on: the best weights, early stops, resumed runs."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from runs import config, losses, weights

from remanence import Model
from remanence.data import prepare
from remanence.train import SOURCES, DataConfig, OptimizerConfig, Run, export, fit
from remanence.train.distributed import ProcessGroup
from remanence.train.language import ELSEWHERE, VALIDATED, held_out_source, make_task

CPU = ProcessGroup(torch.device("cpu"))


def history(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["validation"] for line in lines if "validation" in line}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    home = tmp_path_factory.mktemp("shards")
    for name, word in (("train", "the sea and the whale "), ("held", "a ship sails to the east ")):
        paths = [home / f"{name}-{number}.txt" for number in range(4)]
        for path in paths:
            path.write_text(word * 12)
        prepare(paths, home / name)
    return home


def packed(shards, kind="packed", **fields):
    data = DataConfig(kind=kind, path=str(shards / "train"), held_out=str(shards / "held"), length=24)
    return config(data=data, **{"validate_every": 4, **fields})


def test_the_loss_is_that_of_the_held_out_tokens(shards, tmp_path):
    """Against cross-entropy, computed here, of batches that another source reads from the held-out folder."""
    given = packed(shards, steps=2, validate_every=1)
    fit(given, tmp_path / "run")
    found = history(tmp_path / "run")
    assert list(found) == [1, 2]
    model = Model.load(tmp_path / "run" / "model").eval()
    other = replace(
        given, data=replace(given.data, path=given.data.held_out, held_out=None), validate_every=0
    )
    source, total, count = SOURCES["packed"](other, 4, 0, 1), 0.0, 0
    for number in range(VALIDATED):
        batch = source.step(number)
        with torch.no_grad():
            logits, _ = model(batch.tokens, offsets=batch.offsets)
        total += float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"))
        count += int((batch.targets >= 0).sum())
    assert min(found.values()) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["packed", "documents"])
def test_validation_does_not_change_training(kind, shards, tmp_path):
    """Nor does an interruption change the validation; with documents, memories are carried."""
    given = packed(shards, kind, carry=kind == "documents", steps=6)
    fit(given, tmp_path / "run")
    plain = replace(given, data=replace(given.data, held_out=None), validate_every=0)
    fit(plain, tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    with Run.open(given, tmp_path / "cut") as run:
        for _ in range(5):
            run.step()
    fit(None, tmp_path / "cut", resume=True)
    assert history(tmp_path / "cut") == history(tmp_path / "run")
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(weights(tmp_path / "cut")[name], tensor)


def test_the_model_is_the_best_and_the_run_stops(tmp_path):
    """With a learning rate that soon makes it worse."""
    given = config(
        steps=12, validate_every=1, stop_after=2, optimizer=OptimizerConfig(lr=1.0, warmup=4, clip=1e3)
    )
    fit(given, tmp_path / "run")
    found = history(tmp_path / "run")
    best = min(found, key=found.get)
    assert max(losses(tmp_path / "run")) == max(found) == best + 2 < 12
    task = make_task(given, CPU)
    assert task.validate(Model.load(tmp_path / "run" / "model")) == pytest.approx(found[best])
    assert found[max(found)] > found[best]
    export(tmp_path / "run", tmp_path / "exported")
    assert task.validate(Model.load(tmp_path / "exported")) == pytest.approx(found[best])


def test_generated_rows_of_a_validation_are_not_those_of_training():
    given = config(validate_every=2)
    held, own = held_out_source(given, 0, 1), SOURCES["recall"](given, 4, 0, 1)
    trained = {tuple(row) for number in range(40) for row in own.step(number).tokens.tolist()}
    assert not trained & {
        tuple(row) for number in range(VALIDATED) for row in held.step(number).tokens.tolist()
    }
    assert held_out_source(replace(given, seed=ELSEWHERE), 0, 1).step(0).tokens.equal(own.step(0).tokens)


def test_a_text_is_validated_on_its_end(tmp_path):
    letters = "".join(chr(97 + (i * i) % 23) for i in range(20000))
    (tmp_path / "own.txt").write_text(letters + "0123456789" * 400)
    data = DataConfig(kind="text", path=str(tmp_path / "own.txt"), length=24)
    given = config(data=data, validate_every=2, carry=True, steps=4)
    held = {
        token
        for number in range(4)
        for token in held_out_source(given, 0, 1).step(number).tokens.unique().tolist()
    }
    assert held & set(b"0123456789") and not SOURCES["text"](given, 4, 0, 1).step(0).tokens.max() < 97
    fit(given, tmp_path / "run")
    assert list(history(tmp_path / "run")) == [2, 4]


def test_wrong_settings_are_one_line(shards, tmp_path, command):
    common = [
        "train",
        "text",
        "--out",
        tmp_path / "run",
        "--steps=2",
        "--device=cpu",
        "--batch=2",
        "--data.length=16",
    ]
    path = f"--data.path={shards / 'train'}"
    for given, message in (
        (
            [f"--data.held_out={shards / 'held'}"],
            "data.held_out: expected validate_every above 0 beside it, got 0",
        ),
        (["--stop_after=2"], "stop_after: expected 0, or validate_every above 0"),
        (
            ["--data.kind=packed", path, "--validate_every=1"],
            "data.held_out: expected data of kind 'packed' that is not",
        ),
        (
            ["--data.kind=packed", path, f"--data.held_out={shards / 'train'}", "--validate_every=1"],
            "data.held_out: expected other data than data.path",
        ),
        (
            ["--data.kind=packed", path, "--data.held_out=nowhere", "--validate_every=1", "--carry=false"],
            "nowhere",
        ),
        (
            ["--data.kind=recall", "--data.held_out=x", "--validate_every=1"],
            "data.held_out: expected only with data.kind=",
        ),
    ):
        assert message in command(*common, "--carry=false", *given, code=2)
        assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
