"""The site builds without a warning and fits every screen; the notebooks run; the diagrams are as drawn."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from browser import Browser, executable
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

# Elements that leave the screen to the right and that nothing around them scrolls or cuts.
WIDE = """[...document.querySelectorAll('.md-content *')].filter(element => {
  if (element.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
  for (let outer = element; outer !== document.body; outer = outer.parentElement)
    if (getComputedStyle(outer).overflowX !== 'visible') return false;
  return true;
}).map(element => element.outerHTML.slice(0, 200))"""


# Blocks of code whose lines are longer than they are wide, or whose letters are small.
CUT = """[...document.querySelectorAll('.md-content pre > code')].filter(code =>
  code.scrollWidth > code.clientWidth + 1 || parseFloat(getComputedStyle(code).fontSize) < 11
).map(code => code.textContent.slice(0, 100))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page(site):
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    pages += [Path("notebooks", path.stem).with_suffix(".html") for path in NOTEBOOKS]
    assert not [page for page in pages if not (site / page).is_file()]
    index = (site / "index.html").read_text(encoding="utf-8")
    assert not [page for page in pages if f'href="{page.as_posix()}"' not in index], "not in the navigation"


@pytest.mark.slow
def test_the_reference_has_what_the_package_exports(site):
    import remanence
    from remanence import cli

    told = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    tables = {"MIXERS", "NETS", "RULES", "State", "__version__"}  # dictionaries and the like, told in words
    missing = [
        name
        for name in set(remanence.__all__) - tables
        if not re.search(rf'id="remanence\.[\w.]*\b{name}"', told)
    ]
    assert not missing
    helped = set(re.findall(r"usage: remanence (\w+)", told))
    assert helped == {command.__metadata__[0].name for command in cli.Command.__args__}


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', text)
        assert not fetched, f"{path.name}: {fetched}"


def test_long_lines_of_code_are_broken_and_say_the_same():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    line = (
        f"remanence train recall --out out/a --prompt 'x --y' {' '.join(f'--field{n}=1' for n in range(8))}"
    )
    page = f"```bash\n{line}          # a long command\nremanence presets  # short\n```\n\n```text\n{line}\n```\n"
    made = hooks.on_page_markdown(page, None, None, None)
    first, text = made.split("```text")
    assert text == f"\n{line}\n```\n" and "\n# short\nremanence presets\n" in first
    assert max(map(len, first.splitlines())) <= hooks.COLUMNS and first.startswith(
        "```bash\n# a long command\n"
    )
    assert first.replace(" \\\n    ", " ").splitlines()[2] == line
    code = f"```python\nif True:\n    call({'1, ' * 20})  # {'why ' * 10}\n```"
    assert hooks.on_page_markdown(code, None, None, None).splitlines()[2].startswith("    # why why")


@pytest.mark.slow
@pytest.mark.skipif(executable() is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen(site, width):
    """Every page: nothing leaves the screen, no line of code is cut, and code is large enough to read."""
    with Browser(width) as browser:
        for path in sorted(site.rglob("*.html")):
            page = path.relative_to(site).as_posix()
            browser.open(path)
            assert browser("document.documentElement.scrollWidth") <= width, page
            assert not browser(WIDE), page
            assert not browser(CUT), page
            assert browser("[...document.images].every(image => image.naturalWidth > 0)"), page
        assert not browser.errors


@pytest.mark.slow
@pytest.mark.skipif(executable() is None, reason="no Chromium")
@pytest.mark.parametrize("page", ["index.html", "results/facts.html"])
def test_search_works_in_a_page_opened_from_the_disk(site, page):
    with Browser() as browser:
        browser.open(site / page)
        browser("document.querySelector('.md-search__input').focus()")
        browser.send("Input.insertText", text="perplexity")
        found = []
        for _ in range(100):
            found = browser(
                "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
            )
            if found:
                break
            time.sleep(0.1)
        assert any("evaluation.html" in link for link in found), found
        assert not browser.errors
        assert all(url.startswith(("file:", "data:", "about:")) for url in browser.requests)


def plain(text):
    """What was printed, without its numbers: those differ from machine to machine."""
    return re.sub(r"\d[\d.,]*", "#", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    """And print what they show, up to numbers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = nbformat.read(path, 4)
    nbformat.validate(shown)
    ran = NotebookClient(
        nbformat.read(path, 4), timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    for before, after in zip(shown.cells, ran.cells, strict=True):
        told = [
            "".join(output.get("text", "?") for output in cell.get("outputs", [])) for cell in (before, after)
        ]
        assert plain(told[0]) == plain(told[1]), before.source
        assert len(told[0]) < 1000


def test_there_are_two_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["memory_as_a_layer", "read_save_ask"]


def test_diagrams_are_as_drawn():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "diagrams" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert sorted(path.stem for path in (DOCS / "diagrams").glob("*.svg")) == sorted(draw.DIAGRAMS)
    for name, made in draw.DIAGRAMS.items():
        svg = (DOCS / "diagrams" / f"{name}.svg").read_text(encoding="utf-8")
        assert svg == made(), f"{name}.svg: run python docs/diagrams/draw.py"
        assert "prefers-color-scheme: dark" in svg and "<title>" in svg
