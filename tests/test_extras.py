"""The code of README and docs runs with what a page says to install, and nothing more.

The wheel is unpacked beside the packages that its metadata requires for the extras that a page names above a block,
and theirs in turn. No other package can be imported there, so that a missing extra, or one that lacks a package, fails.
"""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

import pytest
import stage
from packaging.requirements import Requirement
from test_blocks import DATA, PAGES, ROOT, blocks, commands

INSTALL = re.compile(r"pip install '?(?:\.|remanence)\[([\w,]+)\]")
CHEAP = ("data", "prepare")
"""Of commands, those that are run here: what they need depends on the files that they are given."""
WITHIN = """
import io, os, sys, contextlib, json
for where, folder, text in json.loads(sys.stdin.read()):
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if isinstance(text, str):
                exec(compile(text, where, "exec"), {"__name__": "__main__"})
            else:
                from remanence import cli
                cli.main(text)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            print(f"{where}: {type(error).__name__}: {error}", flush=True)
"""


def named_above(text):
    """Every block with the extras that the page names above it in its section, or in front of the first section."""
    lines = text.split("\n")
    for block in blocks(text):
        before = lines[: block.line - 1]
        first = next((number for number, line in enumerate(before) if line.startswith("## ")), len(before))
        section = max((number for number, line in enumerate(before) if line.startswith("## ")), default=0)
        above = "\n".join([*before[:first], *before[max(first, section) :]])
        yield block, frozenset(name for found in INSTALL.findall(above) for name in found.split(","))


def test_extras_are_those_above_a_block():
    code = "```python\n1\n```\n"
    page = f"pip install '.[a]'\n{code}## B\npip install '.[b,c]'\n{code}## D\n{code}"
    assert [sorted(extras) for _, extras in named_above(page)] == [["a"], ["a", "b", "c"], ["a"]]


def needed(requirements, extras):
    """The distributions that requirements stand for, and theirs, as far as this machine has them."""
    found, todo = {}, [(requirement, extras) for requirement in requirements]
    while todo:
        text, own = todo.pop()
        requirement = Requirement(text)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in [*own, ""]
        ):
            continue
        if requirement.name == "remanence":
            todo += [(each, requirement.extras) for each in requirements]
            continue
        known = found.setdefault(requirement.name, set())
        if known >= {"", *requirement.extras}:
            continue
        known |= {"", *requirement.extras}
        try:
            todo += [(each, requirement.extras) for each in distribution(requirement.name).requires or []]
        except PackageNotFoundError:  # another platform's
            found.pop(requirement.name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """A function of extras: the Python of an environment with the wheel and what it requires for them."""

    def made(extras):
        home = tmp_path_factory.mktemp("env")
        venv.create(home, with_pip=False, symlinks=os.name == "posix")
        (site,) = [
            path for path in home.rglob("site-packages") if path.is_dir() and "lib64" not in path.parts
        ]
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
        (about,) = site.glob("remanence-*.dist-info")
        for name in needed(PathDistribution(about).requires, extras):
            for path in distribution(name).files or []:
                top = path.parts[0]
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(Path(distribution(name).locate_file(top)).resolve())
        return next(home.glob("bin/python"), home / "Scripts" / "python.exe")

    return made


def asked(extras):
    """Every block of Python, and every cheap command, above which exactly these extras are named."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for block, own in named_above(page.read_text(encoding="utf-8")):
            if own != extras or block.why is not None or block.language in DATA:
                continue
            where = f"{name}:{block.line}"
            if block.language == "python":
                yield name, where, block.text
            elif block.language == "bash":
                for words in commands(block.text):
                    if tuple(words[1 : 1 + len(CHEAP)]) == CHEAP:
                        yield name, where, words[1:]
    for example in sorted((ROOT / "examples").glob("*.py")):
        text = example.read_text(encoding="utf-8")
        if (found := INSTALL.search(text)) and set(found[1].split(",")) == extras:
            yield "examples", f"examples/{example.name}", text


def every_extras():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = {own for text in texts for _, own in named_above(text)}
    return sorted((own for own in found if any(asked(own))), key=sorted)


def test_pages_name_extras():
    assert {frozenset(), frozenset({"hf"}), frozenset({"attach"})} <= set(every_extras())


@pytest.mark.slow
@pytest.mark.parametrize("extras", every_extras(), ids=lambda own: "+".join(sorted(own)) or "none")
def test_blocks_run_with_the_extras_that_a_page_names(extras, place, tmp_path):
    folders = {}
    for name, _, _ in asked(extras):
        if name not in folders:
            folders[name] = tmp_path / name.replace("/", "-")
            folders[name].mkdir()
            stage.set_up(folders[name])
    given = [(where, str(folders[name]), text) for name, where, text in asked(extras)]
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(place(extras)), "-c", WITHIN]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, env=quiet, cwd=tmp_path
    )
    assert done.returncode == 0 and not done.stdout, f"extras {sorted(extras)}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_what_no_extra_names_cannot_be_imported(place, tmp_path):
    code = (
        "import remanence, importlib.util as u;"
        "assert 'env' in remanence.__file__, remanence.__file__;"
        "assert u.find_spec('torch') and u.find_spec('numpy');"
        "missing = 'transformers accelerate gguf peft datasets faiss pytest'.split();"
        "assert not [name for name in missing if u.find_spec(name)]"
    )
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(place(frozenset())), "-c", code], check=True, env=quiet, cwd=tmp_path)
