"""An evaluation as a whole: it goes on where it was, tells where its numbers come from, and says what is wrong in one
line.
"""

import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluations import measured, saved
from models import model
from rich.table import Table

from remanence import Model, attach, cli
from remanence.cli.evaluate import table
from remanence.evaluate import TASKS, Subject, checkpoint, provenance, subject
from remanence.evaluate import run as run_module
from remanence.evaluate.run import Journal, commit, write_rows
from remanence.evaluate.task import Row, configured, perplexity, share, wilson
from remanence.inference import memfile
from remanence.io.files import locked_file
from remanence.runtime.overrides import by_owner, format_length, parse_length
from remanence.tokenizers.tokens import byte_level_json

ROOT = Path(__file__).parent.parent.parent
TEXT = "It was the best of times, it was the worst of times. " * 6


@pytest.fixture
def home(tmp_path, monkeypatch):
    saved(tmp_path / "m")
    (tmp_path / "t").mkdir()
    for name in "abc":
        (tmp_path / "t" / f"{name}.txt").write_text(TEXT + name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(command):
    return partial(command, "eval")


def test_the_command_writes_rows_with_their_origin_and_tells_what_the_memory_is_worth(home, run):
    said = run(
        "m",
        "lm",
        "--data=t",
        "--window=64",
        "--memory-mode",
        "on",
        "off",
        "--json",
        "r.json",
        "--device",
        "cpu",
    )
    assert "on - off" in said and "perplexity" in said
    rows = json.loads((home / "r.json").read_text())["rows"]
    assert {"task", "metric", "value", "setting", "provenance"} <= set(rows[0])
    assert {row["setting"]["memory"] for row in rows} == {"on", "off"}
    origin = rows[0]["provenance"]
    native = Subject.load(home / "m", torch.device("cpu")).model
    assert origin["model"] == memfile.fingerprint(native)._asdict()
    assert {"seed", "date", "commit", "hardware", "torch", "remanence"} <= set(origin)
    assert "origin" not in rows[0], "it is the provenance, and is not told twice"
    assert (home / "r.lm.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_of_a_run_is_called_after_the_run(home):
    for source, name in ((home / "m", "m"), (home / "run" / "model", "run/model")):
        assert provenance(Subject.load(saved(source), torch.device("cpu")))["from"] == name


def test_a_difference_of_shares_is_in_points_like_the_shares():
    def row(mode, **facts):
        return Row(task="x", metric="y", setting={"memory": mode}, **facts)

    def cells(rows):
        return [next(iter(column.cells)) for column in table(rows, ("on", "off")).columns]

    shares = [row("on", **share(9, 10)), row("off", **share(1, 10))]
    assert cells(shares) == ["y", "90.0% (60-98)", "10.0% (2-40)", "+80.0 points"]
    assert cells([row("on", value=3.0), row("off", value=4.5)]) == ["y", "3", "4.5", "-1.5"]
    assert cells([row("on", value=0.1 + 0.2), row("off", value=0.3)])[-1] == "+0", (
        "what is rounded is no difference"
    )


def test_going_on_after_an_interruption_gives_the_same_rows(home, monkeypatch):
    expected = measured("m", "lm", data="t", window="32")
    journal, task = home / "j.jsonl", TASKS["lm"]
    measure, calls = task.measure, []

    def interrupted(self, units):
        calls.append(units)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, units)

    monkeypatch.setattr(task, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured("m", "lm", data="t", window="32", journal=journal)
    with open(journal, "a") as file:
        file.write('{"unit": {"half a li')  # of a process that was killed while it wrote
    assert measured("m", "lm", data="t", window="32", journal=journal) == expected
    assert len(calls) == 4 + 3, "three of six units were kept"
    assert measured("m", "lm", data="t", window="32", journal=journal) == expected
    assert len(calls) == 7, "nothing is measured twice"
    measured("m", "lm", data="t", window="16", journal=journal)
    assert len(calls) == 10, "another window is another unit, the stream is not"


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(home):
    (home / "t" / "long.txt").write_text(TEXT * 10)
    words = [
        "-m",
        "remanence",
        "eval",
        "m",
        "lm",
        "--data=t",
        "--window=64",
        "--json",
        "r.json",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (home / "r.units.jsonl").exists() and (home / "r.units.jsonl").read_text().count("\n") >= 2:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    process.wait()
    assert not (home / "r.json").exists() or process.returncode == 0, "rows are whole or not there"
    assert (
        subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL).returncode == 0
    )
    expected = [row.value for row in measured("m", "lm", data="t", window="64")]
    assert [row["value"] for row in json.loads((home / "r.json").read_text())["rows"]] == pytest.approx(
        expected, rel=1e-6
    )


def test_results_of_another_model_are_refused(home, run):
    run("m", "lm", "--data=t", "--views=window", "--json", "r.json", "--device", "cpu")
    saved(home / "other", "lmm")
    assert "expected results of this model" in run("other", "lm", "--data=t", "--json", "r.json", code=2)
    (home / "mine.json").write_text('{"precious": 1}')
    assert "expected a new file" in run("m", "lm", "--data=t", "--json", "mine.json", code=2)
    assert json.loads((home / "mine.json").read_text()) == {"precious": 1}
    (home / "mine.json").write_text("[1]")
    assert "--json: expected a new file, or an earlier evaluation's" in run(
        "m", "lm", "--data=t", "--json", "mine.json", code=2
    )


def test_rows_that_cannot_be_written_are_known_before_anything_is_measured(home, run, monkeypatch):
    def refused(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_module.tempfile, "TemporaryFile", refused)
    said = run("m", "lm", "--data=t", "--json", "t/r.json", code=2)
    assert "--json: expected a folder that can be written to, got t (Permission denied)" in said
    assert {path.name for path in (home / "t").iterdir()} == {"a.txt", "b.txt", "c.txt"}


def test_results_of_another_tokenizer_are_refused(home, run):
    pytest.importorskip("tokenizers")
    run("m", "lm", "--data=t", "--views=window", "--json", "r.json", "--device", "cpu")
    assert json.loads((home / "r.json").read_text())["rows"][0]["provenance"]["tokenizer_digest"] == "bytes"
    other = byte_level_json()
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (home / "m" / "tokenizer.json").write_text(json.dumps(other))
    (home / "m" / "tokenizer_config.json").unlink()
    said = run("m", "lm", "--data=t", "--json", "r.json", code=2)
    assert "expected results of this model and its tokenizer" in said


def test_rows_tell_where_earlier_units_were_measured(home, run, monkeypatch):
    asked = ("m", "lm", "--data=t", "--views=window", "--json", "r.json", "--device", "cpu")
    monkeypatch.setattr(run_module, "hardware", lambda place: "an old machine")
    run(*asked)
    first = json.loads((home / "r.json").read_text())["rows"][0]["provenance"]
    monkeypatch.setattr(run_module, "hardware", lambda place: "a new machine")
    monkeypatch.setattr(run_module, "commit", lambda root: "c0ffee")
    run(*asked)
    again = json.loads((home / "r.json").read_text())["rows"][0]["provenance"]
    assert again == first and again["hardware"] == "an old machine", "nothing was measured anew"
    journal = home / "r.units.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-1]) + "\n")
    run(*asked)
    mixed = json.loads((home / "r.json").read_text())["rows"][0]["provenance"]
    assert mixed["hardware"] == ["an old machine", "a new machine"] and mixed["commit"] == [
        first["commit"],
        "c0ffee",
    ]
    assert mixed["torch"] == first["torch"] and mixed["model"] == first["model"]
    older = [{key: json.loads(line)[key] for key in ("unit", "result")} for line in lines[1:]]
    journal.write_text("\n".join(lines[:1] + [json.dumps(line) for line in older]) + "\n")
    run(*asked)
    assert json.loads((home / "r.json").read_text())["rows"][0]["provenance"]["hardware"] is None, (
        "of an older file: not known"
    )


def test_a_journal_forgets_what_is_damaged_and_is_one_evaluations(tmp_path):
    path = tmp_path / "j"
    Journal(path, {"model": 1}).record({"length": 1024}, {"loss": 2.5})
    path.write_text(path.read_text().replace("2.5", "1.5"))
    assert Journal(path, {"model": 1}).find({"length": 1024}) is None
    path.write_text('{"own')  # killed inside of the first line
    Journal(path, {"model": 1}).record({"length": 1024}, {"loss": 2.5})
    assert Journal(path, {"model": 1}).find({"length": 1024}) == {"loss": 2.5}
    with (
        locked_file(path, "another evaluation"),
        pytest.raises(ValueError, match="j: in use by another evaluation"),
        locked_file(path, "another evaluation"),
    ):
        pass


def test_a_journal_returns_what_it_was_given(tmp_path):
    unit, result = {"depth": 0.5, "name": "é"}, {"log": -1.25e-17, "said": "x\ny"}
    Journal(tmp_path / "j", {"model": 1}).record(unit, result)
    assert Journal(tmp_path / "j", {"model": 1}).find(dict(reversed(unit.items()))) == result
    assert Journal(tmp_path / "j", {"model": 1}).find({**unit, "depth": 0.6}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "lmm", "--data=t"], "task: expected one of"),
        (["m", "lm", "--data=t", "--seed=-1"], "--seed: expected an integer from 0 on, got -1"),
        (
            ["m", "lm", "--data=empty.txt"],
            "lm.data: expected texts of at least two tokens, got the empty file empty.txt",
        ),
        (["m", "nia"], "did you mean 'niah'?"),
        (["m"], "tasks: expected at least one of"),
        (
            ["m", "lm"],
            "lm.data: expected a text file, a folder of them or hf:NAME, got none; --lm.data=PATH gives one",
        ),
        (["m", "lm", "--data=nowhere"], "nowhere, which is not there"),
        (["m", "lm", "--dta=t"], "did you mean 'data'?"),
        (["m", "lm", "--lm.windw=3"], "did you mean 'window'?"),
        (["m", "lm", "--wikitext.window=3"], "--wikitext.window: task: expected one of lm"),
        (["m", "lm", "--data", "t"], "--data: expected --field=value"),
        (["m", "lm", "--data=t", "--window=0"], "lm.window: expected at least 1, got 0"),
        (["m", "lm", "--data=t", "--window=many"], "lm.window: expected an integer"),
        (
            ["m", "lm", "--data=t", "--views=side"],
            "lm.views: expected one or more of window, stream and markov, got side",
        ),
        (["m", "lm", "--data=t", "--json", "t/a.txt/r.json"], "--json: expected a folder that can be made"),
        (
            ["m", "lm", "--data=t", "--memory-mode", "on", "on"],
            "--memory-mode: expected one or more modes, each once",
        ),
        (["m", "lm", "--data=t", "--memory-mode", "of"], "of"),
        (["m", "lm", "lm", "--data=t"], "tasks: expected each task once, got lm twice"),
        (["m", "lambada", "--data=t"], "lambada.data: expected a jsonl file"),
        (["m", "lambada", "--data=cut.jsonl.xz"], "cut.jsonl.xz: damaged (Compressed file ended"),
        (["m", "lambada", "--data=other.jsonl.xz"], "other.jsonl.xz: damaged (Input format not supported"),
        (
            ["m", "babilong", "--data=cut.jsonl.xz"],
            "babilong.data: expected a folder or a tar archive, got cut.jsonl.xz",
        ),
        (
            ["m", "babilong", "--data=other.jsonl.xz"],
            "babilong.data: expected a folder or a tar archive, got other.jsonl.xz",
        ),
        (["m", "niah", "--kinds=pk", "--niah.depths=nan"], "niah.depths: expected at least 0, got nan"),
        (["nowhere", "lm", "--data=t"], "model: expected a folder with config.json"),
    ],
)
def test_wrong_arguments_are_one_line(home, run, arguments, message):
    whole = lzma.compress(b'{"text": "one two"}\n' * 9)
    (home / "cut.jsonl.xz").write_bytes(whole[: len(whole) - 20])
    (home / "other.jsonl.xz").write_bytes(b'{"text": "one two"}\n')
    (home / "empty.txt").touch()
    assert message in run(*arguments, code=2)


def test_the_last_of_a_repeated_setting_counts_and_a_tasks_own_comes_first():
    given = [
        ("samples", "1"),
        ("niah.samples", "5"),
        ("samples", "2"),
        ("niah.batch", "3"),
        ("niah.batch", "4"),
    ]
    found = by_owner(given, {name: TASKS[name].Settings.__dataclass_fields__ for name in ("niah", "lambada")})
    assert found == {"niah": {"samples": "5", "batch": "4"}, "lambada": {"samples": "2"}}


def test_a_model_without_memory_has_nothing_to_freeze(home, run):
    saved(home / "plain", "attention")
    said = run("plain", "lm", "--data=t", "--memory-mode", "frozen", code=2)
    assert "memory_mode: expected 'on', as the blocks ('attention',) have no memory, got 'frozen'" in said


def test_a_model_of_another_vocabulary_reads_no_text(home, run):
    model("mac", torch.float32, vocab_size=80).save(home / "small")
    assert "tokenizer: expected at most the model's 80 tokens, got 257" in run(
        "small", "lm", "--data=t", code=2
    )


def test_wilsons_interval_by_hand():
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 5)[0] == 0.0 and 0.43 < wilson(0, 5)[1] < 0.44
    assert wilson(5, 5)[1] == 1.0
    assert share(3, 4)["value"] == 0.75
    with pytest.raises(ValueError, match="correct"):
        wilson(3, 2)


def test_what_is_not_finite_is_null(tmp_path):
    assert perplexity(1e6) == math.inf and perplexity(0.0) == 1.0
    write_rows(
        tmp_path / "r.json", [Row(task="lm", metric="perplexity", value=math.inf, setting={})], {"seed": 0}
    )
    (row,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert row["value"] is None and row["provenance"] == {"seed": 0}


def test_all_that_is_not_finite_is_null(tmp_path):
    row = Row(
        task="x",
        metric="y",
        value=1.0,
        setting={"at": math.nan},
        interval=(0.0, math.inf),
        deviation=math.nan,
    )
    write_rows(tmp_path / "r.json", [row], {})
    (read,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert (read["setting"], read["interval"], read["deviation"]) == ({"at": None}, [0.0, None], None)


@pytest.mark.parametrize(
    ("task", "setting", "text"),
    [
        ("lm", "views", "window,window"),
        ("niah", "kinds", "pk,pk"),
        ("niah", "lengths", "1K,1024"),
        ("niah", "depths", "0.5,0,0.50"),
        ("babilong", "tasks", "qa1,qa1"),
        ("recall", "distances", "16,16"),
        ("commonsense", "benchmarks", "piqa,piqa"),
        ("ablate", "seeds", "0,0"),
    ],
)
def test_a_value_given_twice_is_refused(task, setting, text):
    with pytest.raises(ValueError, match=rf"^{task}.{setting}: expected each value once, got \S+ twice$"):
        configured(TASKS[task], {setting: text})


def test_numbers_as_people_write_them():
    assert [parse_length(text) for text in ("7", "4K", "10m", "1M")] == [7, 4096, 10 * 2**20, 2**20]
    assert [format_length(number) for number in (7, 4096, 10 * 2**20, 1500)] == ["7", "4K", "10M", "1500"]
    settings = configured(TASKS["lm"], {"data": "x", "views": "window", "max_tokens": "2K", "window": "64"})
    assert (settings.views, settings.max_tokens, settings.window) == (("window",), 2048, 64)
    assert replace(settings, max_tokens=None) == configured(
        TASKS["lm"], {"data": "x", "views": "window", "window": "64"}
    )


def test_the_commit_is_the_checkouts(tmp_path):
    assert commit(tmp_path) is None
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        assert commit(ROOT) in (head, head + "+")


def test_the_document_names_every_task_and_setting():
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for task, setting in re.findall(r"--(\w+)\.(\w+)=", text):
        if task != "task":
            assert setting in TASKS[task].Settings.__dataclass_fields__, f"{task}.{setting}"
    for name, task in TASKS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*\| (.+) \|$", text, re.M)
        told = re.findall(r"`(\w+)`", line) or None
        assert told is None or told == list(task.Settings.__dataclass_fields__), name
        assert re.search(rf"\b{name}\b", cli.Eval.__doc__), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["mac", "hybrid"])
@pytest.mark.parametrize("task", ["lm", "niah"])
def test_a_unit_of_hours_goes_on_in_its_middle(home, monkeypatch, task, variant):
    """Two documents and a long text; after each piece the reading is kept, and what follows is the same to the last
    bit.
    """
    saved(home / "m", variant)
    monkeypatch.setattr(checkpoint, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr(subject, "PIECE", 128)
    monkeypatch.setattr("remanence.inference.reader.PIECE", 128)
    lines = [{"text": TEXT * 2}, {"text": "é" + TEXT * 3}]
    (home / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "lm": {"data": "d.jsonl", "views": "stream", "max_tokens": "1500"},
        "niah": {"kinds": "pk", "lengths": "1500", "depths": "0.5", "samples": "2", "batch": "2"},
    }[task]
    expected = measured("m", task, **settings)
    trace, calls = Model.trace, []

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return trace(self, *arguments, **options)

    monkeypatch.setattr(Model, "trace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured("m", task, journal=home / "r.units.jsonl", **settings)
    assert (home / "r.bookmark.mem").is_file()
    assert measured("m", task, journal=home / "r.units.jsonl", **settings) == expected
    again = len(calls) - 9
    calls.clear()
    calls.extend([1] * 10)
    measured("m", task, **settings)
    assert again == len(calls) - 10 - 8, "eight pieces were not read again"
    assert not (home / "r.bookmark.mem").exists()


def test_a_checkpoint_of_another_text_is_not_taken_up(home, monkeypatch):
    monkeypatch.setattr(checkpoint, "SAVE_INTERVAL", 0.0)
    one, other = (np.frombuffer((TEXT + name).encode(), np.uint8) for name in "ab")
    read = Subject.load(home / "m", torch.device("cpu"))
    read.checkpoint = checkpoint.ReadingCheckpoint(home / "b.mem")
    seen = []
    read.on_tokens = seen.append
    read.read([one])
    read.read([one])
    assert seen[2] > 0, "the same text is not read again"
    counted = len(seen)
    read.read([other])
    assert seen[counted] == 0 and sum(seen[counted:]) == len(other)


class TestQuickLook:
    """By default lm and niah take about a minute with a small model, and say that and how more is measured."""

    @pytest.fixture
    def asked(self, home, monkeypatch, capsys):
        def ask(*arguments):
            """The settings with which tasks are made, and what is said."""
            found = {}

            def measured(self, subject, tasks):
                found.update({task.name: task.settings for task in tasks})
                return []

            monkeypatch.setattr("remanence.cli.evaluate.Eval._measure", measured)
            monkeypatch.setattr("remanence.cli.evaluate.table", lambda rows, modes: Table())
            (home / "long.txt").write_text(TEXT * 20)
            cli.main(["eval", "m", *arguments, "--data=long.txt", "--device", "cpu"])
            return found, capsys.readouterr().err

        return ask

    def test_a_quick_look_is_the_default_and_says_so(self, asked):
        found, said = asked("lm", "niah")
        assert found["lm"].max_tokens == 32 * 1024
        units = len(found["niah"].kinds) * len(found["niah"].lengths) * len(found["niah"].depths)
        assert units * found["niah"].samples == 18 and max(found["niah"].lengths) == 4096
        assert "lm: limited to max_tokens=32K; --full runs all" in said
        assert "niah: limited to lengths=1K,4K" in said

    def test_full_is_what_the_settings_are_by_themselves(self, asked):
        found, said = asked("lm", "niah", "--full")
        assert found["lm"] == TASKS["lm"].Settings(data="long.txt")
        assert found["niah"] == TASKS["niah"].Settings(data="long.txt")
        assert "quick" not in said

    def test_a_setting_that_says_how_much_takes_the_limits_away(self, asked):
        found, said = asked("lm", "niah", "--lm.max_tokens=none", "--niah.samples=2")
        assert found["lm"].max_tokens is None and "quick" not in said
        assert found["niah"] == TASKS["niah"].Settings(data="long.txt", samples=2)
        found, said = asked("lm", "niah", "--batch=2", "--window=64")
        assert (found["niah"].batch, found["niah"].samples) == (2, 1)
        assert (found["lm"].window, found["lm"].max_tokens) == (64, 32 * 1024)


def test_a_pretrained_model_with_a_memory_is_evaluated(tmp_path):
    """Tasks need a `CausalModel`. An attached model is one, and not a `Model`."""
    transformers = pytest.importorskip("transformers")
    from remanence.tokenizers.tokens import ByteTokenizer

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=257, max_position_embeddings=512, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    attach(str(tmp_path / "base"), every=1, head_dim=16).save_pretrained(tmp_path / "attached")
    (tmp_path / "text.txt").write_text("a few words of text " * 20)
    subject = Subject.load(tmp_path / "attached", torch.device("cpu"))
    settings = configured(TASKS["lm"], {"data": str(tmp_path / "text.txt"), "views": "stream"})
    rows = run_module.evaluate(subject, [TASKS["lm"](subject, settings)], ("on", "off"))
    assert {row.setting["memory"] for row in rows} == {"on", "off"}
