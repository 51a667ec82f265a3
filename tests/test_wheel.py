"""What is given to an index: complete, accepted by its own checker, and at work without the repository."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import remanence

ROOT = Path(__file__).parent.parent
HOME = "https://example.org/remanence"
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]


def python(*arguments, cwd, **variables):
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the source distribution and the wheel that is built from it, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=ROOT, REMANENCE_HOME=HOME)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("*.whl")
    assert found.name == f"remanence-{remanence.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(found) as file:
        yield file


def files(folder):
    """All files of the repository's folder, but what Python has made of them."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_it_has_every_file_of_the_package_and_the_examples(wheel, dist):
    wanted = files("remanence") | {f"remanence/{name}" for name in files("examples")}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert files("remanence") | files("examples") | {"README.md", "LICENSE", "hatch_build.py"} <= names


@pytest.mark.slow
def test_the_indexs_checker_accepts_it(dist):
    said = python("-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert said.count("PASSED") == 2


@pytest.mark.slow
def test_links_work_on_an_index_page(wheel):
    """Each is absolute, and leads to a file of this version."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    page = message_from_bytes(wheel.read(name)).get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 20 and all(re.match("https?:|#", link) for link in links)
    ours = [link for link in links if link.startswith(HOME)]
    assert ours
    for link in ours:
        kind, version, path = link.removeprefix(f"{HOME}/").split("/", 2)
        assert version == f"v{remanence.__version__}" and (ROOT / path.partition("#")[0]).exists(), link
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")


def test_without_an_address_links_to_files_are_words():
    sys.path.insert(0, str(ROOT))
    try:
        from hatch_build import absolute
    finally:
        sys.path.remove(str(ROOT))
    text = "![A plot](docs/a.png) [a](b.md), [c](https://d.org), [e](#f)"
    assert absolute(text, None, "1") == "*A plot* a, [c](https://d.org), [e](#f)"
    expected = "![A plot](h/raw/v1/docs/a.png) [a](h/blob/v1/b.md), [c](https://d.org), [e](#f)"
    assert absolute(text, "h/", "1") == expected


@pytest.mark.slow
def test_it_works_without_the_repository(wheel, tmp_path):
    """Unpacked elsewhere: a recipe and a model by name, and an example."""
    wheel.extractall(tmp_path / "site")
    place = {"cwd": tmp_path, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *PATHS])}
    where = python("-c", "import remanence; print(remanence.__file__)", **place).strip()
    assert Path(where).is_relative_to(tmp_path)
    assert "parameters" in python("-m", "remanence", "train", "recall", "--dry-run", **place)
    assert "remanence-small" in python("-m", "remanence", "inspect", "remanence-small", **place)
    python("-m", "remanence.examples.own_net", **place)


def test_one_version_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == remanence.__version__ == "0.2.0"
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {"build", "hatchling", "twine"} <= set(pins)
