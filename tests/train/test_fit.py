"""Nothing is lost: a run killed at any moment goes on to the same losses, to the last bit, as one that was not."""

import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from runs import config, losses, weights

from remanence import Model, Session
from remanence.io.files import read_json, write_json
from remanence.io.tensors import read_tensors, write_tensors
from remanence.ops import chunked
from remanence.testing import assert_close
from remanence.train import (
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingError,
    engine,
    export,
    fit,
    override,
)
from remanence.train.carry import carry_in
from remanence.train.checkpoint import Progress, checkpoints
from remanence.train.sources import SOURCES


def test_it_learns(tmp_path):
    fit(config(steps=60, log_every=10, optimizer=OptimizerConfig(lr=2e-2, warmup=5)), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[60] < 0.8 * found[10]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"surprise", "step_size", "keep", "tokens_per_s", "gradient", "lr"} <= lines[-1].keys()
    assert {line["clamped"] for line in lines} == {0}
    assert lines[-1]["tokens"] == 60 * 4 * 24
    assert (tmp_path / "run" / "metrics.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["recall", "packed", "documents"])
def test_resuming_from_any_checkpoint_is_not_stopping(tmp_path, shards, kind):
    data = DataConfig(kind=kind, length=24, **({"pairs": 4} if kind == "recall" else {"path": shards}))
    whole, part = tmp_path / "whole", tmp_path / "part"
    setting = config("mac", data=data, carry=kind == "documents", keep=9)
    fit(setting, whole)
    for step in (3, 6, 9):
        shutil.copytree(whole, part)
        for later in checkpoints(part / "checkpoints"):
            if int(later.name) > step:
                shutil.rmtree(later)
        shutil.rmtree(part / "model")
        fit(None, part, resume=True)
        assert losses(part) == losses(whole)
        assert_close(weights(part), weights(whole), 0.0)
        shutil.rmtree(part)


def test_the_end_of_a_document(tmp_path, shards):
    """Its padding is read, yet the loss is that of the document alone, nothing of it is left to the next, and no memory
    of it is handed out.
    """
    data = DataConfig(kind="documents", path=shards, length=24)
    given = config("mag", data=data, carry=True, keep=99, save_every=1)
    source = SOURCES["documents"](given, 4, 0, 1)
    ends = {step: (~source.step(step).mask.all(1)).tolist() for step in range(12)}
    last = max(step for step, rows in ends.items() if any(rows) and not all(rows))
    given = replace(given, steps=last + 1)
    fit(given, tmp_path / "run")
    over, inside = ends[last].index(True), ends[last].index(False)
    with pytest.raises(
        ValueError,
        match=rf"row: expected one of [\d, ]+, got {over}, whose document ended with the run's last step",
    ):
        export(tmp_path / "run", tmp_path / "no", memory=tmp_path / "no.mem", row=over)
    assert not (tmp_path / "no").exists() and not (tmp_path / "no.mem").exists()
    export(tmp_path / "run", tmp_path / "model", memory=tmp_path / "run.mem", row=inside)

    torch.manual_seed(0)
    model, batch = Model(given.model).double(), source.step(last)
    with torch.no_grad():
        padded, masked = model(batch.tokens)[0], model(batch.tokens, mask=batch.mask)[0]
    assert_close(padded[batch.targets >= 0], masked[batch.targets >= 0], 1e-10)


def test_a_graph_is_refused_where_there_is_none(tmp_path):
    with pytest.raises(
        ValueError, match="graph: expected None or false on cpu, which has no CUDA graphs, got true"
    ):
        fit(config(graph=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_trained_can_be_talked_to(tmp_path, shards):
    fit(config(data=DataConfig(kind="packed", path=shards, length=24), steps=2), tmp_path / "run")
    assert isinstance(Session(tmp_path / "run" / "model").generate("abc", max_tokens=3), str)


RUN = """
import sys
sys.path.insert(0, sys.argv[2])
from runs import config
from remanence.train import fit
import os
fit(config(steps=40), sys.argv[1], resume=os.path.exists(sys.argv[1] + "/config.json"))
"""


def start(run):
    command = [sys.executable, "-c", RUN, str(run), os.path.dirname(__file__)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    heard = lambda: signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # a job in the background would be started deaf to it
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heard)


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_kill_9_at_random_moments_changes_nothing(tmp_path, most):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(120) == 0
    chance, kills = random.Random(1), 0
    for _ in range(most):
        process = start(killed)
        # From when the run is there: most of the time before is torch's import.
        while process.poll() is None and not (killed / "metrics.jsonl").exists():
            time.sleep(0.01)
        seen = (killed / "metrics.jsonl").stat().st_mtime_ns if kills else 0
        while kills and process.poll() is None and (killed / "metrics.jsonl").stat().st_mtime_ns == seen:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
    last = start(killed)
    assert last.wait(120) == 0, last.stderr.read()
    assert kills >= 1
    assert losses(killed) == losses(whole)
    assert_close(weights(killed), weights(whole), 0.0)


@pytest.mark.slow
def test_killed_inside_a_save_the_last_checkpoint_stands(tmp_path, monkeypatch):
    """Every write of a save is made the last one in turn; what is left behind is taken up, or cleared away."""
    whole = tmp_path / "whole"
    fit(config(), whole)
    from remanence.train import checkpoint

    for moment in ("write_tensors", "write_json"):
        run = tmp_path / moment
        real, calls = getattr(checkpoint, moment), []

        def killed(*args, real=real, calls=calls):
            calls.append(1)
            if len(calls) == 3:
                raise SystemExit(9)
            return real(*args)

        monkeypatch.setattr(checkpoint, moment, killed)
        with monkeypatch.context() as kept:
            kept.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)  # a kill cleans nothing up
            with pytest.raises(SystemExit):
                fit(config(), run)
        monkeypatch.setattr(checkpoint, moment, real)
        assert any(path.name.startswith(".") for path in (run / "checkpoints").iterdir())
        fit(None, run, resume=True)
        assert losses(run) == losses(whole)
        assert not any(path.name.startswith(".") for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "well"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_asked_to_end_it_saves_first(tmp_path, sent, well):
    process = start(tmp_path / "run")
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not losses_so_far(tmp_path / "run"):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(sent)
    ended = process.wait(60)
    done = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name)
    assert done >= max(losses_so_far(tmp_path / "run")) > 0
    if done < 40:
        assert (ended == 0) == well, process.stderr.read()
        assert not (tmp_path / "run" / "model").exists()


def losses_so_far(run):
    try:
        return losses(run)
    except json.JSONDecodeError:
        return {}


def test_only_the_last_checkpoints_are_kept(tmp_path):
    fit(config(keep=2), tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["00000009", "00000012"]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    from remanence.train import checkpoint

    real, calls = checkpoint.write_tensors, []

    def full(*args):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        fit(config(), tmp_path / "run")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000003"]
    fit(None, tmp_path / "run", resume=True)
    assert len(losses(tmp_path / "run")) == 12


def test_parts_add_up_to_the_step(tmp_path):
    """A batch in four parts is the batch at once, in the order that the source deals rows."""
    one, four = config(), config(accumulate=4)
    torch.manual_seed(0)
    model = Model(one.model).double()
    batches = [SOURCES["recall"](four, 1, 0, 1).step(n) for n in range(4)]
    together = batches[0]._replace(
        tokens=torch.cat([b.tokens for b in batches]), targets=torch.cat([b.targets for b in batches])
    )
    grads = []
    for parts in ([together], batches):
        optimizer = engine.make_optimizer(model, one)
        optimizer.step = lambda: None
        engine.take_step(model, optimizer, one, parts, None, 0)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert_close(grads[0], grads[1], 1e-12)


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run(tmp_path, monkeypatch):
    real, bad = Model.logits, {4, 5}
    calls = []

    def sometimes(self, hidden):
        calls.append(1)
        return real(self, hidden) * (float("nan") if len(calls) in bad else 1.0)

    monkeypatch.setattr(Model, "logits", sometimes)
    fit(config(), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["skipped"] == 2
    calls.clear()
    bad.update(range(6, 100))
    with pytest.raises(TrainingError, match="got 3 steps in a row without"):
        fit(config(patience=3), tmp_path / "other")
    assert (tmp_path / "other" / "bad-batch.safetensors").is_file()


def test_what_the_leash_held_is_told_by_line(tmp_path, monkeypatch, command):
    """As if every carried gradient had outgrown its reach: each row and head of the one layer, in each of a line's
    steps.
    """
    real = chunked.GradientClamp.__init__

    def short(self, *args):
        real(self, *args)
        self.relative_limit = 1e-9

    monkeypatch.setattr(chunked.GradientClamp, "__init__", short)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"import sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom runs import config as recipe\n"
    )
    with contextlib.redirect_stderr(io.StringIO()) as said:
        command("train", recipe, "--out", tmp_path / "run", "--steps=5", "--log_every=2")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["clamped"] for line in lines] == [2 * 4 * 2, 2 * 4 * 2, 4 * 2]
    assert "16 clamped" in said.getvalue()


def test_documents_carry_their_memory_and_begin_anew(tmp_path, shards):
    """Over pieces of documents, the carried loss is the loss of each document read whole."""
    setting = config("lmm", data=DataConfig(kind="documents", path=shards, length=16), batch=2, carry=True)
    source = SOURCES["documents"](setting, 2, 0, 1)
    torch.manual_seed(0)
    model, state = Model(setting.model).double(), None
    from remanence.data import Tokens

    data = Tokens(shards)
    whole = {
        bytes(data[i][:3].astype("uint8")): model(torch.from_numpy(data[i].astype("int64"))[None])[0]
        for i in range(len(data))
    }
    read = ["", ""]
    for n in range(8):
        batch = source.step(n)
        state = carry_in(model, state, batch)
        seen = model.trace(batch.tokens, state, mask=batch.mask)
        state = seen.state
        for row in range(2):
            inputs = batch.tokens[row][batch.mask[row]].tolist()
            read[row] = inputs if batch.begins[row] else read[row] + inputs
            expected = whole[bytes(token % 256 for token in read[row][:3])][
                0, len(read[row]) - len(inputs) : len(read[row])
            ]
            assert_close(model.logits(seen.hidden[row][batch.mask[row]]), expected, 1e-9)


class TestConfigs:
    def test_dotted_overrides(self):
        changed = override(
            config(),
            {
                "optimizer.lr": "3e-4",
                "model.memory.chunk": "8",
                "steps": "5",
                "checkpointing": "yes",
                "model.pattern": "mac,lmm",
            },
        )
        assert (changed.optimizer.lr, changed.model.memory.chunk, changed.steps, changed.checkpointing) == (
            3e-4,
            8,
            5,
            True,
        )
        assert changed.model.pattern == ("mac", "lmm")
        assert TrainConfig.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("optimzer.lr", "1", r"optimzer\.lr: field of TrainConfig: .* did you mean 'optimizer'"),
            ("optimizer.lrr", "1", r"field of OptimizerConfig: .* did you mean 'lr'"),
            ("steps", "many", r"steps: expected an integer \(1K is .*\), got 'many'"),
            ("precision", "half", "precision: expected one of float32, bfloat16, got 'half'"),
            ("steps.more", "1", r"steps\.more: expected a field, got something inside 'steps'"),
            (
                "optimizer.schedule",
                "cosin",
                "expected one of cosine, wsd, constant, got 'cosin'; did you mean 'cosine'",
            ),
            ("accumulate", "3", "accumulate: expected a divisor of batch=4, got 3"),
            (
                "carry",
                "yes",
                r"carry: expected data\.kind='documents' or 'text' or 'facts' or 'fact_dialogues' or 'genome', whose",
            ),
        ],
    )
    def test_wrong_overrides(self, name, text, message):
        with pytest.raises(ValueError, match=message):
            override(config(), {name: text})

    def test_schedules(self):
        o = OptimizerConfig(lr=1.0, warmup=10, final=0.1)
        assert o.rate(0, 100) == pytest.approx(0.1) and o.rate(9, 100) == pytest.approx(1.0)
        assert o.rate(99, 100) == pytest.approx(0.1) and o.rate(54, 100) == pytest.approx(0.55)
        wsd = OptimizerConfig(lr=1.0, warmup=10, schedule="wsd", decay=0.2, final=0.0)
        assert (
            wsd.rate(79, 100) == 1.0 and wsd.rate(89, 100) == pytest.approx(0.5) and wsd.rate(99, 100) == 0.0
        )
        edges = [("wsd", 50, 0.8, 100), ("wsd", 0, 0.01, 10), ("cosine", 0, 0.2, 1), ("wsd", 9, 1, 5)]
        for schedule, warmup, decay, steps in edges:
            edge = OptimizerConfig(lr=1.0, warmup=warmup, schedule=schedule, decay=decay, final=0.1)
            rates = [edge.rate(step, steps) for step in range(steps)]
            assert all(0 < rate <= 1 for rate in rates)
            falling = rates[warmup:]
            assert falling == sorted(falling, reverse=True)
            assert decay < 0.1 or all(a - b < 0.1 for a, b in itertools.pairwise(falling)), "no jump"
            assert warmup >= steps or falling[-1] == pytest.approx(0.1)

    def test_a_run_is_never_overwritten(self, tmp_path):
        fit(config(steps=1), tmp_path / "run")
        with pytest.raises(ValueError, match="out: expected a new or empty folder"):
            fit(config(), tmp_path / "run")
        with pytest.raises(ValueError, match="out: expected a run, with its config"):
            fit(None, tmp_path / "nowhere", resume=True)
        with pytest.raises(
            ValueError,
            match=r"data\.kind: expected one of packed, .*, babilong.*, got 'recal'; did you mean 'recall'",
        ):
            fit(config(data=DataConfig(kind="recal")), tmp_path / "new")
        with pytest.raises(ValueError, match="length: expected at least 16 for 2 rounds of 4 pairs, got 10"):
            fit(config(data=DataConfig(kind="recall", pairs=4, length=10)), tmp_path / "new")
        assert not (tmp_path / "new").exists(), "what cannot be run leaves nothing behind"


class TestWhatReviewersFound:
    def test_what_is_not_finite_inside_the_model_is_skipped_too(self, tmp_path):
        """Not only in the loss: a layer that meets NaN does not end the run by itself."""
        setting = config(
            "lmm",
            model=config("lmm").model,
            steps=6,
            patience=3,
            optimizer=OptimizerConfig(lr=1e30, warmup=0),
        )
        setting = override(setting, {"model.num_layers": "2", "accumulate": "2"})
        with pytest.raises(TrainingError, match="got 3 steps in a row without"):
            fit(setting, tmp_path / "run")
        found = read_tensors(tmp_path / "run" / "bad-batch.safetensors")
        assert {"tokens.0", "targets.0", "tokens.1", "targets.1"} <= found.tensors.keys() and found.metadata[
            "step"
        ] == "3"

    def test_a_skipped_step_still_begins_documents_anew(self, tmp_path, shards, monkeypatch):
        """And a carried memory that has diverged can be saved, loaded, and begins anew."""
        setting = config(
            "lmm",
            data=DataConfig(kind="documents", path=shards, length=16),
            carry=True,
            steps=8,
            save_every=1,
            keep=9,
        )
        entered, real = [], engine.take_step

        def stumbles(model, optimizer, given, batches, state, number, process_group, begin, **more):
            entered.append((batches[0].begins.tolist(), state.position.tolist()))
            if number in (2, 3):
                model.logits = lambda hidden: Model.logits(model, hidden) * float("nan")
            step = real(model, optimizer, given, batches, state, number, process_group, begin, **more)
            model.__dict__.pop("logits", None)
            if number == 5:
                memory = step.trace.state.blocks[0].memory
                memory.layers[0].data[0] = float("nan")
                memory.diverged[0] = True
            return step

        monkeypatch.setattr(engine, "take_step", stumbles)
        fit(setting, tmp_path / "run")
        for begins, position in entered:
            assert all(place == 0 for place, anew in zip(position, begins, strict=True) if anew)
        assert entered[6][1][0] == 0, "a diverged memory begins anew"
        for later in ("00000007", "00000008"):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
        shutil.rmtree(tmp_path / "run" / "model")
        before = losses(tmp_path / "run")
        fit(None, tmp_path / "run", resume=True)
        assert losses(tmp_path / "run") == before

    def test_a_checkpoint_that_does_not_fit_is_refused(self, tmp_path):
        fit(config("lmm", steps=6), tmp_path / "run")
        last = checkpoints(tmp_path / "run" / "checkpoints")[-1]
        whole = read_tensors(last / "model.safetensors").tensors
        name = next(iter(whole))
        where = {key: read_json(last / "progress.json")[key] for key in Progress._fields}
        write_json(last / "progress.json", where)  # as before files were named with their digests
        write_tensors(
            last / "model.safetensors", {key: value for key, value in whole.items() if key != name}, {}
        )
        message = rf"00000006: {re.escape(name)}: expected a tensor .*, got none; .* remove that folder to go on from 00000003"  # noqa: E501
        with pytest.raises(ValueError, match=message):
            fit(None, tmp_path / "run", resume=True)
        write_tensors(last / "model.safetensors", whole, {})
        write_json(last / "progress.json", {})
        with pytest.raises(ValueError, match=r"progress.json: expected integers step"):
            fit(None, tmp_path / "run", resume=True)
        shutil.rmtree(last)
        fit(None, tmp_path / "run", resume=True)
        data = read_json(tmp_path / "run" / "config.json")
        data["model"]["depth"] = 2
        write_json(tmp_path / "run" / "config.json", data)
        with pytest.raises(ValueError, match="expected a checkpoint of the run's own model"):
            fit(None, tmp_path / "run", resume=True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"optimizer.warmup": "-5"}, "warmup: expected a number from 0"),
            ({"optimizer.final": "nan"}, "final: expected a finite number, got nan"),
            ({"optimizer.betas": "0.9"}, "betas: expected 2, each a finite number, got"),
            ({"optimizer.betas": "0.9,1.5"}, r"betas\[1\]: expected a number from 0 to"),
            ({"seed": "-1"}, "seed: expected a number from 0"),
            ({"prompt": ""}, "prompt: expected at least one character"),
            (
                {"data.kind": "documents", "carry": "true", "model.pattern": "attention"},
                "carry: expected blocks of constant size",
            ),
        ],
    )
    def test_nonsense_is_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            override(config(), changes)

    def test_a_config_edited_by_hand_is_checked(self):
        for part, name, value in (
            ("optimizer", "warmup", "5"),
            (None, "compile", "false"),
            (None, "data", None),
            (None, "model", 3),
        ):
            data = config().to_dict()
            (data[part] if part else data)[name] = value
            with pytest.raises(ValueError, match=f"{name}: expected"):
                TrainConfig.from_dict(data)

    def test_the_width_and_no_trackers_can_be_asked_for(self):
        assert override(config(), {"model.dim": "32"}).model.memory.dim == 32
        assert override(config(trackers=("wandb",)), {"trackers": ""}).trackers == ()

    def test_rates_count_what_was_read(self, tmp_path, shards):
        setting = config("lmm", data=DataConfig(kind="documents", path=shards, length=512), steps=2, batch=2)
        fit(setting, tmp_path / "run")
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        source = SOURCES["documents"](setting, 2, 0, 1)
        assert lines[-1]["tokens"] == sum(int(source.step(n).mask.sum()) for n in range(2))

    def test_a_run_is_exported_from_anywhere_whole_or_not_at_all(self, tmp_path, shards, monkeypatch):
        monkeypatch.chdir(os.path.dirname(shards))
        fit(
            config("lmm", data=DataConfig(kind="packed", path="tokens", length=24), steps=2), tmp_path / "run"
        )
        monkeypatch.chdir("/")
        shutil.rmtree(shards)
        export(tmp_path / "run", tmp_path / "model")
        assert isinstance(Session(tmp_path / "model").generate("abc", max_tokens=2), str)
        assert not list(tmp_path.glob(".model*"))
