"""A grid of models from one recipe: what each variant changes, numbers by hand, and going on after an interruption."""

import json
from dataclasses import replace
from math import exp, inf, nan
from statistics import mean, stdev

import pytest
import torch
import torch.nn.functional as F
from evaluations import Rows
from models import config

from remanence import Model, cli
from remanence.data import prepare
from remanence.evaluate import TASKS, Subject, configured, evaluate
from remanence.evaluate import grid as grid_module
from remanence.inference import reader
from remanence.tasks.recall import Recall
from remanence.train import DataConfig, OptimizerConfig, TrainConfig

RECIPE = TrainConfig(
    model=config("mac", vocab_size=11, memory={"conv": 4, "net": "titans"}),
    data=DataConfig(kind="recall", length=12, pairs=2, keys=4, noise=3),
    optimizer=OptimizerConfig(warmup=1),
    steps=4,
    batch=4,
    save_every=2,
    log_every=1,
    device="cpu",
)


def grid(folder, name="ablate", recipe=RECIPE, **settings):
    subject = Subject(torch.device("cpu"), folder=folder / "runs", recipe=recipe, source=folder / "r.py")
    return TASKS[name](subject, configured(TASKS[name], {"batches": "2", **settings}))


def measured(task, **options):
    return Rows(evaluate(task.subject, [task], **options))


def test_each_variant_changes_one_thing(tmp_path):
    task = grid(tmp_path)
    assert task.variants == ("base", "linear", "no_conv", "no_momentum", "no_forget", "no_persistent")
    base = task.config("base", 3)
    assert base == replace(RECIPE, seed=3)
    for name, changed in (
        ("linear", {"net": "linear"}),
        ("no_conv", {"conv": 0}),
        ("no_momentum", {"rule": "no_momentum"}),
        ("no_forget", {"rule": "no_forget"}),
    ):
        assert task.config(name, 3) == replace(
            base, model=replace(base.model, memory=replace(base.model.memory, **changed))
        )
    assert task.config("no_persistent", 3) == replace(base, model=replace(base.model, persistent=0))
    assert [grid(tmp_path, "depth").config(str(depth), 0).model.memory.depth for depth in (1, 2, 3, 4)] == [
        1,
        2,
        3,
        4,
    ]
    deep = grid(tmp_path, recipe=replace(RECIPE, model=config("mac", vocab_size=11)))
    assert deep.variants == ("base", "linear", "no_conv", "no_forget", "no_persistent"), (
        "it has no momentum to take away"
    )
    assert (deep.config("linear", 0).model.memory.depth, deep.config("no_forget", 0).model.memory.rule) == (
        1,
        "delta",
    )
    alone = replace(RECIPE, model=replace(RECIPE.model, pattern=("lmm",)))
    assert "no_persistent" not in grid(tmp_path, recipe=alone).variants, "an LMM has none to take away"


@pytest.mark.slow
def test_numbers_by_hand(tmp_path):
    task = grid(tmp_path, variants="base,no_conv", seeds="0,1", lengths="12,20")
    rows = measured(task)
    for length in (12, 20):
        values = []
        for seed in (0, 1):
            model, loss, count = Model.load(tmp_path / "runs" / f"ablate-no_conv-{seed}" / "model"), 0.0, 0
            for number in range(2):
                batch = Recall(length, 4, 2, 2, 2**32, keys=4, noise=3).step(number)
                with torch.no_grad():
                    logits = model(batch.tokens)[0][batch.targets >= 0]
                loss += float(F.cross_entropy(logits, batch.targets[batch.targets >= 0], reduction="sum"))
                count += len(logits)
            values.append(exp(loss / count))
            assert rows.value("perplexity", variant="no_conv", length=length, trained=seed) == pytest.approx(
                values[-1], rel=1e-5
            )
        row = rows.row("perplexity", variant="no_conv", length=length, seeds=2)
        assert (row.value, row.deviation) == pytest.approx((mean(values), stdev(values)), rel=1e-4)
    names = [path.name for path in task.plots({"on": rows}, tmp_path / "r")]
    assert names == ["r.ablate-perplexity.png", "r.ablate-accuracy.png"]


def test_rows_are_read_in_pieces_and_few_logits_are_held(tmp_path, monkeypatch):
    task = grid(tmp_path, variants="base", lengths="20")
    model = Model(RECIPE.model).eval()
    whole = task._measure(model)["20"]
    monkeypatch.setattr(reader, "PIECE", 7)
    monkeypatch.setattr(grid_module, "LOGITS", 22)
    trace, logits, read, held = Model.trace, Model.logits, [], []

    def counted(self, tokens, *arguments, **options):
        read.append(tokens.shape[1])
        return trace(self, tokens, *arguments, **options)

    def few(self, hidden):
        held.append(hidden.shape[:-1].numel())
        return logits(self, hidden)

    monkeypatch.setattr(Model, "trace", counted)
    monkeypatch.setattr(Model, "logits", few)
    parts = task._measure(model)["20"]
    assert parts == {**whole, "loss": pytest.approx(whole["loss"], rel=1e-5)}
    assert max(read) == 7 and max(held) == 2 and sum(held) == whole["count"]


def test_one_diverged_seed_leaves_the_rows_of_all(tmp_path):
    task = grid(tmp_path, variants="base", seeds="0,1")
    found = [{"12": {"loss": loss, "right": 0.5, "count": 8}} for loss in (1.0, nan)]
    rows = Rows(task.rows(list(zip([unit for (unit,) in task.units()], found, strict=True))))
    assert rows.value("perplexity", seeds=2) == inf and rows.row("perplexity", seeds=2).deviation is None
    assert rows.value("perplexity", trained=0) == exp(1) and rows.row("accuracy", seeds=2).deviation == 0


@pytest.mark.slow
def test_going_on_gives_the_same_rows(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    expected = measured(
        grid(tmp_path / "whole", "depth", variants="1,2", seeds="5"), journal=tmp_path / "whole" / "j"
    )
    fit, fits = grid_module.fit, []

    def interrupted(config, out, *, resume, log):
        fits.append(resume)

        def stop(line):
            log(line)
            if len(fits) == 2 and line["step"] == 3:
                raise KeyboardInterrupt

        return fit(config, out, resume=resume, log=stop)

    monkeypatch.setattr(grid_module, "fit", interrupted)
    task = grid(tmp_path / "parts", "depth", variants="1,2", seeds="5")
    with pytest.raises(KeyboardInterrupt):
        measured(task, journal=tmp_path / "parts" / "j")
    assert measured(task, journal=tmp_path / "parts" / "j") == expected
    assert fits == [False, False, True], "the first is ready, the second goes on from its checkpoint"
    assert measured(task, modes=("on", "off"), journal=tmp_path / "parts" / "j").row(
        "perplexity", variant="1", seeds=1, memory="off"
    )
    assert len(fits) == 3, "another mode of the memory is another question to the same models"
    other = grid(tmp_path / "parts", "depth", variants="1", seeds="5", steps="9")
    with pytest.raises(ValueError, match="expected a run of this recipe"):
        measured(other)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = RECIPE.to_dict()
    (tmp_path / "r.py").write_text(
        f"from remanence.train import TrainConfig\n\ndef recipe():\n    return TrainConfig.from_dict({words!r})\n"
    )
    cli.main(
        [
            "eval",
            "r.py",
            "depth",
            "--variants=1",
            "--steps=2",
            "--batches=1",
            "--json",
            "d.json",
            "--device",
            "cpu",
        ]
    )
    assert "perplexity" in capsys.readouterr().out
    rows = json.loads((tmp_path / "d.json").read_text())["rows"]
    assert (
        rows[0]["provenance"]["from"] == "r.py"
        and len(rows[0]["provenance"]["recipe"]) == 32
        and (tmp_path / "d.runs" / "depth-1-0" / "model").is_dir()
    )
    cli.main(
        [
            "eval",
            "r.py",
            "depth",
            "--variants=1",
            "--batches=1",
            "--recipe.steps=1",
            "--json",
            "c.json",
            "--device",
            "cpu",
        ]
    )
    assert json.loads((tmp_path / "c.runs" / "depth-1-0" / "config.json").read_text())["steps"] == 1, (
        "the recipe was changed"
    )
    capsys.readouterr()
    for arguments, message in (
        (
            ["r.py", "depth"],
            "depth: expected --json OUT, next to which the trained models are saved, got none",
        ),
        (["r.py", "lm", "--data=r.py"], "model: expected a folder with config.json"),
        (["r.py", "depth", "--recipe.batc=2", "--json", "x.json"], "did you mean 'batch'?"),
        (
            ["d.runs/depth-1-0/model", "recall", "--recipe.batch=2"],
            "--recipe.batch: expected a task that trains models by a recipe",
        ),
        (["r.py", "lm", "ablate"], "tasks: expected tasks of a model or tasks of a recipe, got both"),
        (["d.runs/depth-1-0/model", "depth", "--json", "x.json"], "model: expected a recipe, such as recall"),
        (
            ["r.py", "depth", "--variants=5", "--json", "x.json"],
            "depth.variants: expected one of 1, 2, 3, 4, got '5'",
        ),
        (["r.py", "depth", "--lengths=3", "--json", "x.json"], "length: expected at least 8 for 2 rounds"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["eval", *arguments])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and message in said and said.count("\n") == 1


def test_recipes_without_memory_or_held_out_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="ablate: expected a recipe whose model has a memory"):
        grid(tmp_path, recipe=replace(RECIPE, model=replace(RECIPE.model, pattern=("window",))))
    with pytest.raises(
        ValueError, match=r"ablate.data: expected held-out shards, got none; --ablate.data=FOLDER"
    ):
        grid(tmp_path, recipe=replace(RECIPE, data=DataConfig(kind="packed", path="x")))
    with pytest.raises(
        ValueError,
        match=r"ablate: expected a recipe that names the shards.*got none; --recipe.data.path=FOLDER",
    ):
        grid(tmp_path, recipe=replace(RECIPE, data=DataConfig(kind="packed")), data="x")


@pytest.mark.parametrize("kind", ["packed", "documents"])
def test_shards_are_held_out(tmp_path, kind):
    for name, text in (
        ("train", "All happy families are alike. "),
        ("other", "Call me Ishmael, some years ago. "),
    ):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{n} {text * 9}"}) + "\n" for n in range(6))
        )
        prepare([str(tmp_path / f"{name}.jsonl")], tmp_path / f"{name}-tokens")
    data = DataConfig(kind=kind, path=str(tmp_path / "train-tokens"), length=32)
    recipe = replace(
        RECIPE, model=config("mag", vocab_size=257), data=data, carry=kind == "documents", steps=1
    )
    task = grid(tmp_path, recipe=recipe, variants="base", lengths="24", data=str(tmp_path / "other-tokens"))
    batch = task._held_out_batch(24, 0)
    assert "Ishmael" in bytes(token for token in batch.tokens.flatten().tolist() if token < 256).decode()
    row = measured(task).row("perplexity", variant="base", seeds=1)
    assert (
        row.count == sum(int((task._held_out_batch(24, number).targets >= 0).sum()) for number in range(2))
        and row.value > 1
    )


def test_the_papers_figure_stands_beside_texts_only(tmp_path):
    assert grid(tmp_path, "depth").published_lines("perplexity") == {}, (
        "generated tasks have nothing to do with it"
    )
    for name in ("train", "other"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: all happy families are alike. " * 90)
        prepare([str(tmp_path / f"{name}.txt")], tmp_path / f"{name}-tokens")
    data = DataConfig(kind="packed", path=str(tmp_path / "train-tokens"), length=32)
    recipe = replace(RECIPE, model=config("mag", vocab_size=257), data=data)
    task = grid(
        tmp_path, "depth", recipe=recipe, variants="1,3", lengths="16,32", data=str(tmp_path / "other-tokens")
    )
    assert (
        set(task.published_lines("perplexity")) == {"depth 1, 170M", "depth 3, 170M"}
        and task.published_lines("accuracy") == {}
    )
    assert task.published_lines("perplexity")["depth 3, 170M"][0] == (2048, 15.3)


@pytest.mark.parametrize("modes", [("on",), ("on", "off")])
def test_a_variant_has_one_colour_and_a_mode_one_pattern(tmp_path, monkeypatch, modes):
    drawn = []
    monkeypatch.setattr(
        grid_module, "curves", lambda path, lines, **words: drawn.append((lines, words["styles"]))
    )
    task = grid(tmp_path, variants="base,no_conv", lengths="12,20")
    results = [
        (unit, {str(n): {"loss": 1.0, "right": 0.5, "count": 8} for n in (12, 20)})
        for (unit,) in task.units()
    ]
    task.plots(dict.fromkeys(modes, task.rows(results)), tmp_path / "r")
    lines, styles = drawn[0]
    assert set(lines) == set(styles) and len(set(styles.values())) == 2 * len(modes), "no two look the same"
    assert {look for name, look in styles.items() if name.startswith("no_conv")} == {
        (1, at) for at in range(len(modes))
    }
