"""Every command and every block of code in README and docs runs here, in a folder of its own for each page, or says
above it why it does not: ``<!-- not run: why -->``.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import stage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(remanence|python|pip|make|torchrun|git|bash|pre-commit) \S")
WHY = re.compile(r"<!-- not run: (.+) -->")
DATA = {"text", "bibtex"}
"""Languages of blocks that are only read."""


class Block(NamedTuple):
    line: int
    language: str
    text: str
    why: str | None


def blocks(text):
    """Fenced blocks, and indented ones that hold commands, with the reason above them."""
    lines, number, above = text.split("\n"), 0, ""
    while number < len(lines):
        line, first = lines[number], number + 1
        if line.startswith("```"):
            end = next(place for place in range(first, len(lines)) if lines[place].startswith("```"))
            yield _block(first, line[3:].strip(), lines[first:end], above)
            number, above = end, ""
        elif line.startswith("    ") and not (number and lines[number - 1].strip()):
            end = next(
                (place for place in range(first, len(lines)) if not lines[place].startswith("    ")),
                len(lines),
            )
            body = [part[4:] for part in lines[number:end]]
            if any(COMMAND.match(part) for part in body):
                yield _block(first, "bash", body, above)
            number, above = end - 1, ""
        elif line.strip():
            above = line
        number += 1


def _block(line, language, body, above):
    found = WHY.fullmatch(above.strip())
    return Block(line, language, "\n".join(body), found.group(1) if found else None)


def commands(text):
    """The arguments of each command, comments and line breaks taken out."""
    for line in text.replace("\\\n", " ").split("\n"):
        if words := shlex.split(line, comments=True):
            yield words


# What a command is given besides, so that it takes no longer than a test may: of options given twice, the last counts.
SHORTER = {
    r"train (?!.*--(dry-run|resume))": "--steps=1 --device=cpu",
    r"train recall (?!.*--(dry-run|resume))": "--batch=2",
    r"train (dna|forecast)(?!.*--resume)": "--batch=2",
    r"train dna (?!.*--init_from)": "--model.num_layers=1 --model.dim=64 --data.length=256",
    r"train dna/classify": "--data.length=32",
    r"train forecast": "--model.dim=16 --data.split=7/1/2",
    r"eval .*\bniah\b": "--niah.lengths=384 --niah.kinds=n --niah.samples=1 --niah.depths=0.5 --niah.choices=5",
    r"eval .*\bbabilong\b": "--babilong.lengths=0,256 --babilong.tasks=qa1 --babilong.samples=1",
    r"eval .*\brecall --memory-mode": "--recall.distances=16 --recall.capacities=1 --recall.texts=1",
    r"eval .*\blm\b": "--lm.max_tokens=300",
    r"eval recall ablate": "--seeds=0 --lengths=64 --batches=1 --steps=1 --ablate.variants=base --depth.variants=1",
    r"eval books_small": "--lengths=256 --batches=1 --steps=1 --variants=1 --recipe.model.num_layers=1"
    " --recipe.batch=1",
    r"eval .*\bforecast\b": "--forecast.windows=2 --forecast.phases=1 --forecast.split=7/1/2",
    r"eval .*\bforecast\b.*shifts": "--forecast.shifts=level",
}


def shortened(words):
    line = shlex.join(words)
    return [*words, *(extra for own in SHORTER if re.match(own, line) for extra in SHORTER[own].split())]


# What a page's commands go on from, made by commands of other pages.
BEFORE = {
    "docs/evaluation.md": [
        "new tiny my-model --variant mac",
        "train recall --out out/recall",
        "data prepare books --out out/books",
        "data prepare more-books --out out/other-books",
    ],
    "docs/lens.md": ["new tiny my-model --variant mac"],
    "docs/huggingface.md": ["train recall --out out/recall"],
}


@pytest.mark.parametrize(
    "page",
    [PAGES[0], *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:])],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_blocks_run(page, tmp_path, monkeypatch, command):
    name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    found = [block for block in blocks(text) if block.why is None and block.language not in DATA]
    if not found:
        return
    stage.set_up(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in BEFORE.get(name, []):
        command(*shortened(line.split()))
    for block in found:
        where = f"{name}:{block.line}"
        assert block.language in ("python", "bash"), (
            f"{where}: {block.language!r}: name its language, or why not"
        )
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as told:
                exec(compile(block.text, where, "exec"), {})
            assert "silent harbor" not in block.text or "4170283" in told.getvalue(), where
            continue
        for words in commands(block.text):
            if words == ["pip", "install", "."]:
                continue  # test_the_install_line
            assert words[0] == "remanence", f"{where}: {shlex.join(words)}: say above it why it is not run"
            said = command(*shortened(words[1:]))
            if "What is the number of the silent harbor?" in shlex.join(words):
                assert said.strip() == "4170283", where


def test_the_reasons_are_read():
    page = "```python\n1\n```\n<!-- not run: slow -->\n\n    make x\n\n    a = b\n\n<!-- not run: -->\n```bash\nx\n```"
    assert [(block.line, block.language, block.why) for block in blocks(page)] == [
        (1, "python", None),
        (6, "bash", "slow"),
        (11, "bash", None),
    ]
    assert [*commands("a 'b c' \\\n  --d  # e\n\n# f\ng")] == [["a", "b c", "--d"], ["g"]]


@cache
def source(path):
    return (ROOT / path).read_text(encoding="utf-8")


def wrong(words):
    """What is wrong with a command that is not run, as far as its source tells."""
    modules = [f"{word.replace('.', '/')}.py" for word in words if word.startswith("experiments.")]
    scripts = [word for word in words if re.fullmatch(r"(benchmarks|examples)/\w+\.py", word)] + modules
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", source("Makefile"), re.M)
        return [] if words[1] in targets else [f"make {words[1]}"]
    if not scripts:
        return []
    if not (ROOT / scripts[0]).is_file():
        return scripts
    text = source(scripts[0])
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return [
        flag
        for flag in flags
        if flag not in text and not re.search(rf"\b{flag[2:].replace('-', '_')}\b", text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_not_run_is_there(page):
    """Targets of make, scripts and their flags; and commands named in a sentence."""
    from remanence import cli

    text = page.read_text(encoding="utf-8")
    lines = [
        words
        for block in blocks(text)
        if block.why and block.language == "bash"
        for words in commands(block.text)
    ]
    inline = re.findall(r"`((?:remanence|python|make) [^`\n]+)`", text)
    lines += [line.split() for line in inline]
    for words in lines:
        assert not wrong(words), f"{page.name}: {' '.join(words)}: there is no {', '.join(wrong(words))}"
        if words[0] == "remanence" and words[1].isalpha() and words[1].islower():
            assert hasattr(cli, words[1].capitalize()), f"{page.name}: there is no remanence {words[1]}"


def test_a_wrong_command_is_found():
    assert wrong(["make", "benhc"]) and not wrong(["make", "bench"])
    assert wrong(["python", "benchmarks/nowhere.py"])
    assert wrong(["python", "-m", "experiments.facts.distance", "BOOKS", "--sedes", "0"]) == ["--sedes"]
    assert not wrong(["python", "-m", "experiments.facts.distance", "BOOKS", "--seeds", "0"])


@pytest.mark.slow
def test_the_install_line(tmp_path):
    """``pip install .`` makes a package that reads and answers, away from the clone."""
    line = ["pip", "install", "."]
    for page in ("README.md", "docs/getting-started.md"):
        assert line in [words for block in blocks(source(page)) for words in commands(block.text)]
    pip = [
        sys.executable,
        "-m",
        *line,
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code = (
        "import sys; sys.path.insert(0, 'site'); from remanence import cli; cli.main(['presets', '--help'])"
    )
    done = subprocess.run([sys.executable, "-Ic", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "remanence presets" in done.stdout, done.stderr
    assert (tmp_path / "site" / "remanence" / "shipped" / "remanence-small" / "model.safetensors").is_file()
    assert (tmp_path / "site" / "bin" / "remanence").is_file() or sys.platform == "win32"
