"""The commands as people type them: read, save, ask, resume, and every wrong turn one line long with exit code 2."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from remanence import Model, Session, cli
from remanence.cli import progress, sessions
from remanence.config import PRESETS, preset
from remanence.inference import memfile
from remanence.mixers import BLOCKS
from remanence.model import matched, parameters
from remanence.recipes import NAMES, find_recipe, load_recipe
from remanence.testing import assert_close
from remanence.tokenizers.tokens import load_tokenizer
from remanence.train import TrainConfig

ROOT = Path(__file__).parent.parent

TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 45  # two pieces


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an untrained model, `m`, and a text, `t.txt`."""
    folder = tmp_path_factory.mktemp("home")
    cli.main(["new", "tiny", str(folder / "m"), "--variant", "mac"])
    (folder / "t.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(home, command, monkeypatch):
    monkeypatch.chdir(home)
    return command


def test_reading_saving_and_asking_is_what_a_session_does(run, home, tmp_path):
    path = tmp_path / "o.mem"
    said = run("read", "m", "t.txt", "t.txt", "--save", path, "--device", "cpu")
    assert f"{2 * len(TEXT):,} tokens read" in said
    unit = r"half of the squared error of the memory's answer, summed over the \d+ dimensions of a value"
    assert re.search(rf"mean surprise [\d.]+ \({unit}\)", said)
    session = Session(home / "m")
    session.read(TEXT * 2)
    assert_close(memfile.load(path, session.model), session.state, 0.0)
    answer = run(
        "generate", "m", "--memory-file", path, "--prompt", "And so", "--max-tokens", 12, "--seed", 3
    )
    assert answer == session.generate("And so", max_tokens=12, seed=3) + "\n"
    assert f"[{2 * len(TEXT)}]" in run("inspect", path)
    facts = json.loads(run("inspect", path, "--json"))
    assert facts["tokens"] == [2 * len(TEXT)] and len(facts["layers"]) == 2
    assert json.loads(run("inspect", "m", "--json"))["parameters"] == sum(
        p.numel() for p in session.model.parameters()
    )


def test_reading_on_and_resuming(run, home, tmp_path, monkeypatch):
    first, both, resumed = tmp_path / "1.mem", tmp_path / "2.mem", tmp_path / "3.mem"
    run("read", "m", "t.txt", "--save", first)
    run("read", "m", "t.txt", "--memory-file", first, "--save", both)
    assert memfile.read_file(both)[0]["tokens"] == [2 * len(TEXT)]
    assert "exists; --resume continues it" in run("read", "m", "t.txt", "--save", first, code=2)
    # Interrupted after the first piece of the second text, then resumed: the same to the last bit.
    monkeypatch.setattr(sessions, "AUTOSAVE", -1.0)
    monkeypatch.setattr(progress.Bar, "update", interrupt)
    run("read", "m", "t.txt", "--memory-file", first, "--save", resumed, code=130)
    monkeypatch.undo()
    monkeypatch.chdir(home)
    assert len(TEXT) < memfile.read_file(resumed)[0]["tokens"][0] < 2 * len(TEXT)
    assert "expected the files that" in run(
        "read", "m", "m/config.json", "--save", resumed, "--resume", code=2
    )
    run("read", "m", "t.txt", "--save", resumed, "--resume")
    subject = Session(home / "m").model
    assert_close(memfile.load(resumed, subject), memfile.load(both, subject), 0.0)
    assert " 0 tokens read" in run("read", "m", "t.txt", "--save", resumed, "--resume"), (
        "nothing is left to read"
    )
    # Adding to a memory in place, interrupted and resumed, is the same again.
    monkeypatch.setattr(progress.Bar, "update", interrupt)
    run("read", "m", "t.txt", "--memory-file", first, "--save", first, code=130)
    monkeypatch.undo()
    monkeypatch.chdir(home)
    run("read", "m", "t.txt", "--memory-file", first, "--save", first, "--resume")
    assert_close(memfile.load(first, subject), memfile.load(both, subject), 0.0)


def interrupt(*_):
    raise KeyboardInterrupt


def test_several_prompts_are_lines_of_json(run, home):
    out = run(
        "generate", "m", "--prompt", "a", "And then he", "--max-tokens", 5, "--temperature", 1, "--seed", 4
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "And then he"]
    alone = Session(home / "m").generate("And then he", max_tokens=5, temperature=1.0, seed=5)
    assert rows[1]["text"] == alone


def test_chat_remembers_from_one_conversation_to_the_next(run, home, tmp_path, monkeypatch):
    path = tmp_path / "c.mem"
    for turn, line in enumerate(("hello", "again"), 1):
        lines = iter([line, ""])

        def answer(prompt, lines=lines):
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", answer)
        run("chat", "m", "--memory-file", path, "--max-tokens", 3, "--temperature", 0)
        assert memfile.read_file(path)[0]["tokens"] == [turn * (5 + 1 + 3)]
    session = Session(home / "m")
    for line in ("\nhello", "\nagain"):
        session.generate(line, max_tokens=3, temperature=0)
    assert_close(memfile.load(path, session.model), session.state, 0.0)


def test_modes_and_writes_reach_the_model(run, home, tmp_path):
    first, after = tmp_path / "1.mem", tmp_path / "2.mem"
    run("read", "m", "t.txt", "--save", first)
    run(
        "generate",
        "m",
        "--memory-file",
        first,
        "--prompt",
        "x",
        "--max-tokens",
        4,
        "--memory-mode",
        "frozen",
        "--save",
        after,
    )
    written = {
        name: memfile.read_file(path)[1]["blocks.0.memory.memory.position"].item()
        for name, path in (("1", first), ("2", after))
    }
    assert written["1"] == written["2"] == len(TEXT)
    run(
        "generate",
        "m",
        "--memory-file",
        after,
        "--prompt",
        "x",
        "--max-tokens",
        4,
        "--write",
        "prompt",
        "--save",
        after,
    )
    assert memfile.read_file(after)[1]["blocks.0.memory.memory.position"].item() == len(TEXT) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["read", "nowhere", "t.txt", "--save", "x.mem"],
            "model: expected a folder with config.json and model.safetensors, or the name remanence-small, "
            "or the name remanence-smollm2, got nowhere",
        ),
        (["read", "m", "nowhere.txt", "--save", "x.mem"], "nowhere.txt: no such file"),
        (
            ["read", "m", "t.txt", "--save", "t.txt/such/x.mem"],
            "--save: expected a folder that can be made, got t.txt/such",
        ),
        (
            ["read", "m", "t.txt", "--save", "x.mem", "--memory-file", "t.txt"],
            "t.txt: damaged, or not a safetensors file",
        ),
        (
            ["generate", "m", "--prompt", ""],
            "--prompt: expected a text of at least one character, got an empty one",
        ),
        (["generate", "m", "--prompt", "a", "--memory-file", "nowhere.mem"], "nowhere.mem: no such file"),
        (
            ["generate", "m", "--prompt", "a", "--temperature", "-1"],
            "temperature: expected a number of at least 0, got -1",
        ),
        (["generate", "m", "--prompt", "a", "b", "--save", "x.mem"], "--save: expected a single prompt"),
        (
            ["generate", "m", "--prompt", "a", "--save", "t.txt"],
            "--save: t.txt exists; a memory is only overwritten if it is",
        ),
        (
            ["generate", "m", "--prompt", "a", "--save", "t.txt/x.mem"],
            "--save: expected a folder that can be made, got t.txt",
        ),
        (
            ["chat", "m", "--memory-file", "t.txt/x.mem"],
            "--memory-file: expected a folder that can be made, got t.txt",
        ),
        (["read", "m", "--save", "x.mem"], "files: expected at least one text to read, got none"),
        (["inspect", "[/x].mem"], "[/x].mem: no such file"),
        (
            ["new", "tinny", "x"],
            "preset: expected one of tiny, small, 170m, 340m, 760m, 1.3b, got 'tinny'; did you mean 'tiny'?",
        ),
        (["new", "tiny", "x", "--variant", "mac+wndow"], "--variant: expected one of"),
        (["new", "tiny", "m"], "out: expected a new or empty folder, got m"),
        (["inspect", "t.txt"], "t.txt: damaged, or not a safetensors file"),
        (["inspect", "nowhere"], "nowhere: no such file"),
    ],
)
def test_wrong_turns_are_one_line(run, home, arguments, message):
    before = sorted(os.listdir(home))
    assert message in run(*arguments, code=2)
    assert sorted(os.listdir(home)) == before, "nothing half-written"


def test_other_weights_and_damage_at_the_command_line(run, home, tmp_path):
    run("new", "tiny", tmp_path / "other", "--seed", 5)
    run("read", "m", "t.txt", "--save", tmp_path / "a.mem")
    ask = [
        "generate",
        tmp_path / "other",
        "--memory-file",
        tmp_path / "a.mem",
        "--prompt",
        "x",
        "--max-tokens",
        1,
    ]
    assert "other weights; --force" in run(*ask, code=2)
    run(*ask, "--force")
    whole = (tmp_path / "a.mem").read_bytes()
    (tmp_path / "a.mem").write_bytes(whole[:-7])
    assert "a.mem: damaged" in run(*ask, code=2)


@pytest.mark.slow
def test_a_full_disk_is_one_line(home, tmp_path):
    """A limit on file sizes stands for it."""
    resource = pytest.importorskip("resource")
    model, out = str(home / "m"), tmp_path / "x.mem"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for command in (
        ["generate", model, "--prompt", "hi", "--max-tokens", "2", "--save", str(out)],
        ["new", "tiny", str(tmp_path / "n")],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "remanence.cli", *command],
            capture_output=True,
            text=True,
            preexec_fn=limit,
        )
        assert done.returncode == 2, done.stderr
        assert "could not be written" in done.stderr and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_preparing_data(run, tmp_path):
    out = tmp_path / "tokens"
    said = run("data", "prepare", "t.txt", "--out", out, "--workers", 2)
    assert f"{len(TEXT) + 1:,} tokens in 1 documents from 1 files" in said
    assert "sources: expected at least one file or folder" in run("data", "prepare", "--out", out, code=2)
    assert "nowhere: no such file or folder" in run("data", "prepare", "nowhere", "--out", out, code=2)


def test_training_by_a_recipe(run, tmp_path):
    recipe, out = ROOT / "remanence" / "recipes" / "recall.py", tmp_path / "run"
    small = ["--steps=3", "--batch=2", "--model.num_layers=1", "--log_every=1"]
    assert "the model is in" in run("train", recipe, "--out", out, *small)
    assert json.loads((out / "config.json").read_text())["batch"] == 2
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert Model.load(out / "model").config.num_layers == 1
    assert "out: expected a new or empty folder" in run("train", recipe, "--out", out, *small, code=2)
    assert "expected no changes beside --resume" in run(
        "train", recipe, "--out", out, "--resume", "--steps=4", code=2
    )
    run("train", recipe, "--out", out, "--resume")
    run("export", out, tmp_path / "exported")
    x = torch.randint(80, (1, 30))
    assert torch.equal(Model.load(tmp_path / "exported")(x)[0], Model.load(out / "model")(x)[0])
    assert "out: expected a new or empty folder" in run("export", out, tmp_path / "exported", code=2)
    assert "run: expected a run, with its config" in run("export", "m/nowhere", tmp_path / "y", code=2)
    assert "did you mean 'optimizer'" in run(
        "train", recipe, "--out", tmp_path / "x", "--optimiser.lr=1", code=2
    )
    assert "recipe: expected a Python file" in run("train", "nowhere.py", "--out", tmp_path / "x", code=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", NAMES)
def test_recipes_make_configs(name):
    vertical, slash, own = name.partition("/")
    folder = ROOT / "remanence" / vertical / "recipes" if slash else ROOT / "remanence" / "recipes"
    recipe = folder / f"{own or name}.py"
    assert find_recipe(name) == recipe, "a recipe has the name of its file"
    config = load_recipe(name)
    assert config == load_recipe(recipe)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert parameters(config.model) > 0
    assert len(recipe.read_text().splitlines()) < 60


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["recall", "recall.py", "recipes/recall.py", "recipes/recall"])
def test_a_recipe_is_found_by_name_and_by_the_path_of_earlier_versions(run, tmp_path, name):
    small = ["--steps=1", "--batch=2", "--model.num_layers=1"]
    assert "the model is in" in run("train", name, "--out", tmp_path / "run", *small)
    assert "what it would cost" in run("train", name, "--dry-run", *small)


def test_a_file_of_ones_own_comes_before_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("needle") == find_recipe("needle.py") == ROOT / "remanence" / "recipes" / "needle.py"
    Path("needle.py").write_text("def recipe():\n    return 3\n")
    assert find_recipe("needle.py") == Path("needle.py") and find_recipe("needle") != Path("needle.py")
    with pytest.raises(ValueError, match=r"needle.py: expected recipe\(\) to return a TrainConfig, got int"):
        load_recipe("needle.py")


def test_the_names_of_recipes_are_listed(run, tmp_path):
    assert {"recall", "needle", "titans_1_3b"} <= set(NAMES)
    listed = " ".join(run("train", "--help").replace("│", " ").split())
    assert all(name in listed for name in NAMES)
    for wrong in ("recal", "recipes/recal.py", "elsewhere/recall.py", "recall.json"):
        error = run("train", wrong, "--out", tmp_path / "x", code=2)
        assert f"recipe: expected a Python file or one of {', '.join(NAMES)}, got {wrong}; did you" in error
    assert f"one of {', '.join(NAMES)}, got recal" in run(
        "eval", "recal", "ablate", "--json", tmp_path / "r.json", code=2
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "recall", "--out", "x", "--steps", "3"],
            "--steps: expected --field=value for a field of the config",
        ),
        (["eval", "m", "lm", "-x=3"], "-x=3: expected --field=value for a field of a task"),
        (
            ["train", "recall", "--out", "x", "--batch=few"],
            "batch: expected an integer (1K is 1,024, 1M is 1K times 1K)",
        ),
        (["train", "recall", "--out", "x", "--model.memory.netz=deep"], "did you mean 'net'?"),
    ],
)
def test_wrong_overrides_are_one_line(run, arguments, message):
    assert message in run(*arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "'train'"),
        (["Read", "m"], "'read'"),
        (["train", "recal", "--out", "x"], "'recall'"),
        (["train", "forecast/eth1", "--out", "x"], "'forecast/etth1'"),
        (["new", "tiny", "x", "--variant", "titan"], "'mac' or 'mag' or 'mal' or 'lmm'"),
        (["new", "tiny", "x", "--variant", "Titans"], "'mac' or 'mag' or 'mal' or 'lmm'"),
        (["new", "tiny", "x", "--varient", "mac"], "'--variant'"),
        (["generate", "m", "--promt", "a"], "'--prompt'"),
        (["generate", "m", "--prompt", "a", "--max_token", "3"], "'--max-tokens'"),
        (["train", "recall", "--ou", "x"], "'--out'"),
        (["eval", "m", "lm", "--jsn", "x"], "'--json'"),
    ],
)
def test_a_wrong_name_gets_the_nearest_one(run, arguments, meant):
    import_module("remanence.cli.fields")  # a submodule, which must not hide a name that the package imports
    assert f"did you mean {meant}?" in run(*arguments, code=2)


def test_an_error_names_the_option_that_was_given(run, tmp_path):
    for more in (["--out", tmp_path / "x"], ["--dry-run"]):
        assert "error: --text: expected" in run("train", "--text", "nofile.txt", *more, code=2)
    (tmp_path / "short.txt").write_text("short")
    said = run("train", "--text", tmp_path / "short.txt", "--out", tmp_path / "x", "--steps=1", code=2)
    assert "error: --text: expected a text of at least 4,096 bytes, got 5" in said
    assert "error: --variant: expected" in run("new", "tiny", tmp_path / "y", "--variant", "nothing", code=2)
    assert "error: run: expected a run" in run("export", tmp_path / "nowhere", tmp_path / "y", code=2)


@pytest.mark.slow
def test_the_folders_of_outputs_are_made(run, tmp_path, monkeypatch):
    outputs = {
        "r/a/x.mem": ["read", "m", "t.txt", "--save"],
        "g/a/x.mem": ["generate", "m", "--prompt", "a", "--max-tokens", "1", "--save"],
        "l/a/x.html": ["lens", "m", "--text", "t.txt", "--out"],
        "e/a/x.json": ["eval", "m", "lm", "--data=t.txt", "--views=stream", "--max_tokens=64", "--json"],
        "p/a/x.md": ["report", tmp_path / "e/a/x.json", "--out"],
        "d/a/x/tokenizer.json": ["data", "prepare", "t.txt", "--out"],
        "n/a/x/config.json": ["new", "tiny"],
    }
    for name, command in outputs.items():
        path = tmp_path / name
        run(*command, path.parent if path.suffix == ".json" and path.parent.name == "x" else path)
        assert path.is_file(), name
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run("chat", "m", "--max-tokens", 1, "--memory-file", tmp_path / "c/a/x.mem")
    assert (tmp_path / "c/a/x.mem").is_file()


def test_an_empty_file_is_read_as_nothing_beside_others_and_refused_alone(run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    assert "which is empty" in run("read", "m", tmp_path / "empty.txt", "--save", tmp_path / "e.mem", code=2)
    files = tmp_path / "empty.txt", tmp_path / "short.txt"
    assert "5 tokens read" in run("read", "m", *files, "--save", tmp_path / "e.mem")


@pytest.mark.slow
def test_ctrl_c_saves_what_was_read(home, tmp_path):
    big = tmp_path / "big.txt"
    big.write_text(TEXT * 800)
    command = [
        sys.executable,
        "-m",
        "remanence.cli",
        "read",
        str(home / "m"),
        str(big),
        "--save",
        str(tmp_path / "a.mem"),
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "REMANENCE_AUTOSAVE": "0"},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a background job's children ignore Ctrl-C
    )
    while not (tmp_path / "a.mem").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in err and "Traceback" not in err
    assert 0 < memfile.read_file(tmp_path / "a.mem")[0]["tokens"][0] < 800 * len(TEXT)


class TestPresets:
    def test_the_table_tells_the_truth(self, run):
        rows = {(row["preset"], row["variant"]): row for row in json.loads(run("presets", "--json"))}
        assert {name for name, _ in rows} == set(PRESETS)
        for variant in ("mac", "lmm", "attention"):
            subject = Model(preset("tiny", variant, vocab_size=32_000))
            assert rows["tiny", variant]["parameters"] == sum(p.numel() for p in subject.parameters())
        state = Model(preset("tiny", "mac", vocab_size=32_000)).bfloat16().start(1)
        assert rows["tiny", "mac"]["state_bytes"] == state.nbytes
        assert rows["tiny", "mac"]["kv_tokens"] == round(state.nbytes / (2 * 2 * 128 * 2))
        assert "340m" in run("presets")

    @pytest.mark.slow
    def test_variants_can_be_matched_in_size(self):
        for name in PRESETS:
            target = parameters(preset(name, "attention"))
            for variant in BLOCKS:
                count = parameters(matched(preset(name, variant)))
                assert abs(count / target - 1) < 0.02, (
                    f"{name} {variant}: {count / target:.3f} of the Transformer's"
                )

    def test_the_papers_sizes(self):
        sizes = {name: (c.num_layers, c.dim, c.heads) for name in PRESETS for c in [preset(name)]}
        assert sizes["170m"] == (12, 768, 16) and sizes["340m"] == (24, 1024, 16)
        assert sizes["760m"] == (24, 1536, 16) and sizes["1.3b"] == (18, 2048, 8)
        for name in ("170m", "340m", "760m", "1.3b"):
            config = preset(name)
            assert (config.window, config.segment, config.persistent) == (2048, 512, 128)
            assert (config.memory.net, config.memory.chunk, config.memory.shape[1]) == ("deep", 64, 128)
            paper = preset(name, memory={"net": "titans"}).memory
            assert (paper.rule, paper.chunk, paper.shape[1]) == ("titans", 16, 64), (
                "one field for the paper's own"
            )

    def test_changes_and_unknown_fields(self):
        config = preset("small", ("lmm", "window"), window=64, memory={"chunk": 32})
        assert (config.pattern, config.window, config.memory.chunk, config.memory.head_dim) == (
            ("lmm", "window"),
            64,
            32,
            64,
        )
        kept = Model(preset("tiny"), memory={"chunk": 8}).config.memory
        assert (kept.chunk, kept.head_dim) == (8, 32), "other fields stay as they were"
        with pytest.raises(
            ValueError, match=r"ModelConfig field: expected one of .* got 'windw'; did you mean 'window'"
        ):
            preset("small", windw=3)


def test_a_tokenizer_json_goes_with_the_model(run, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "happy": 1, "families": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    run("new", "tiny", tmp_path / "w", "--tokenizer", tmp_path / "words.json")
    assert load_tokenizer(tmp_path / "w").encode("happy families are") == [1, 2, 0]
    assert "tokens read" in run("read", tmp_path / "w", "t.txt", "--save", tmp_path / "w.mem")


@pytest.mark.slow
def test_a_file_that_is_no_text_gets_one_line_of_warning(run, tmp_path, capsys):
    """It is read all the same."""
    rng = np.random.default_rng(0)
    files = {
        "random.bin": rng.bytes(9000),
        "zeros.txt": bytes(9000),
        "words.txt": ("Größe, naïve, 漢字. " * 400).encode(),
        "latin.txt": ("Schöne Grüße aus Köln. " * 400).encode("latin-1"),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        for command in (
            ["read", "m", path, "--save", tmp_path / f"{name}.mem"],
            ["lens", "m", "--text", path, "--out", tmp_path / "x.html"],
            ["data", "prepare", path, "--out", tmp_path / f"{name}.tokens"],
            ["train", "--text", path, "--out", tmp_path / f"{name}.run", "--steps=1", *SMALLEST],
        ):
            capsys.readouterr()
            cli.main([str(word) for word in command])
            warnings = [line for line in capsys.readouterr().err.splitlines() if "look like text" in line]
            if name in ("random.bin", "zeros.txt"):
                assert len(warnings) == 1 and re.search(r": \d+ % of its bytes are not UTF-8$", warnings[0])
            else:
                assert not warnings, command


SMALLEST = ["--init_from=none", "--batch=1", "--model.num_layers=1", "--model.dim=64", "--data.length=64"]
