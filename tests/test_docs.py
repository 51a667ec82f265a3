"""The documents: README is short and true, every reference leads somewhere, the legend of axes is complete. That their
code and commands run is in tests/test_blocks.py.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

from remanence.runtime.shapes import AXES, ROOM_AXES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "remanence"
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("remanence", "benchmarks", "experiments", "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PROSE = 120


def relative(path):
    return path.relative_to(ROOT).as_posix()


def named(path):
    return pytest.param(path, id=relative(path))


def fenced(lines):
    """Per line, whether it is in a code block: fenced, or indented by four spaces after an empty line."""
    inside, indented, empty = False, False, True
    for line in lines:
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and (indented or empty)
        empty = not line.strip()
        yield inside or fence or indented
        inside ^= fence


class TestReadme:
    def test_it_opens_with_a_picture_two_commands_and_fifteen_lines(self):
        """One screen: what it is, a picture, how to install it, two commands, some Python and one table."""
        opening = README.split("\n## ")[0]
        assert re.search(r"!\[[^\]]+\]\(docs/results/facts\.png\)", opening)
        install, commands = re.findall(r"```bash\n(.*?)```", opening, re.S)
        assert install.startswith("pip install ") and install.count("\n") == 1
        assert re.findall(r"^make (\w+)", commands, re.M) == ["demo", "test"] and commands.count("\n") == 2
        code = re.findall(r"```python\n(.*?)```", opening, re.S)
        assert len(code) == 1 and 10 <= len([line for line in code[0].splitlines() if line]) <= 15
        assert 6 <= len(re.findall(r"^\| .*\]\(docs/results/", opening, re.M)) <= 8
        assert (ROOT / "docs/results/facts.png").stat().st_size < 100_000

    def test_its_headings_and_lines(self):
        headings = re.findall(r"^## (.+)$", README, re.M)
        assert headings == [
            "A chat that remembers",
            "Use it as a layer",
            "Read and remember",
            "Train",
            "Attach",
            "Evaluate",
            "How it works",
            "Results",
            "Package layout",
            "Citation",
        ]
        assert max(len(line) for line in README.splitlines() if not line.startswith("|")) <= PROSE
        for diagram in ("memory", "mac", "mag", "mal", "lmm"):
            assert f"(docs/diagrams/{diagram}.svg)" in README

    @pytest.mark.parametrize(("page", "least"), [("README.md", 6), ("docs/results/index.md", 12)])
    def test_its_figures_are_those_of_the_results(self, page, least):
        """Each row of a table of results links to a page that has the row's figures."""
        text = (ROOT / page).read_text(encoding="utf-8")
        rows = re.findall(r"^\|[^|]+\|([^|]+)\|([^|]*)\|[^|(]*\(([\w/]+\.md)\) \|$", text, re.M)
        assert len(rows) >= least
        for ours, theirs, linked in rows:
            measured = ((ROOT / page).parent / linked).read_text(encoding="utf-8")
            figures = re.findall(r"\d[\d,]*(?:\.\d+)?", ours + theirs)
            assert figures, linked
            for figure in figures:
                found = re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", measured)
                assert found, f"{page}: {figure}: not found in {linked}"

    def test_its_versions_are_pinned(self):
        """`make setup` installs torch as constraints.txt has it, and all that the extra docs names is there, too."""
        pinned = (ROOT / "constraints.txt").read_text()
        assert re.search(r"^torch==2\.13\.0$", pinned, re.M)
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for name in (re.match(r"[\w-]+", package).group() for package in extras["docs"]):
            assert re.search(rf"^{name}==", pinned, re.M), name

    def test_package_layout_lists_every_package(self):
        layout = README.split("## Package layout")[1].split("\n## ")[0]
        for path in sorted(PACKAGE.iterdir()):
            package = path.suffix == ".py" or (path / "__init__.py").is_file()
            if package and not path.name.startswith("__"):
                assert f"`{path.name}`" in layout, f"README.md: the package layout lacks {relative(path)}"


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example):
    assert len(example.read_text().splitlines()) < 100
    command = [sys.executable, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if example.stem == "layer_in_your_model":
        last = re.findall(r"loss on the repeats (\d\.\d+)", done.stdout)[-1]
        assert float(last) < 1.5, "the model learns to use its memory"
    if example.stem == "training_loop":
        losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d\.\d+)", done.stdout)]
        assert losses[-1] < min(2.4, 0.8 * losses[0]), "the loss falls, to what 0.7 of a slower start was"
    if example.stem == "read_save_ask":
        right, without = re.findall(r"(\d) right from the memory, (\d) right without it", done.stdout)[0]
        better = int(right) >= 3 > int(without) or int(right) == 5
        assert better, "the memory remembers what the model alone cannot know"


class TestStyle:
    @pytest.mark.parametrize("path", [*map(named, [*DOCUMENTS, ROOT / "CHANGELOG.md"])])
    def test_no_placeholder_is_left(self, path):
        assert not re.search(r"SPEED_|MEM_|MEASURED|TODO|FIXME", path.read_text(encoding="utf-8"))

    @pytest.mark.parametrize("path", [*map(named, DOCUMENTS)])
    def test_lines_of_prose_are_short(self, path):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, (line, code) in enumerate(zip(lines, fenced(lines), strict=True), 1):
            # A table's row cannot be wrapped, nor can one long link.
            link = re.fullmatch(r"\s*(?:- )?!?\[[^\]]*\]\([^)]*\)\S?", line)
            free = code or link or line.lstrip().startswith("|")
            where = f"{relative(path)}:{number}"
            assert free or len(line) <= PROSE, f"{where}: {len(line)} characters, expected at most {PROSE}"


# A path that ends in .py or begins with one of our folders, and behind a colon the names that are defined there:
# `ops/rules.py: RULES, Rule.forget`. Outside of backticks, names are only read at the end of a line of a code block,
# where they annotate a formula.
PATH = r"(?<![\w/.*-])((?:[\w-]+/)*\w+\.py|(?:docs|remanence|examples|experiments)/[\w/.-]*\w)\b(?!\(|\*)"
NAMES = r"[A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*"


def references(text, code=()):
    """Every (line number, path, names) that a text refers to."""
    code = list(code) or [False] * text.count("\n") + [False]
    for number, line in enumerate(text.split("\n"), 1):
        for found in re.finditer(PATH, line):
            rest = line[found.end() :]
            quoted = line[: found.start()].count("`") % 2 == 1
            names = re.match(rf": ({NAMES})`", rest) if quoted else None
            beside = number <= len(code) and code[number - 1] and line[: found.start()].endswith("  ")
            if beside and not quoted:
                names = re.match(rf": ({NAMES})\s*$", rest)
            yield number, found.group(1), names.group(1).split(", ") if names else []


def resolve(path, referring):
    """The file that a reference means, from the repository, the package, or a folder above the referring file."""
    folders = [ROOT, PACKAGE, *[folder for folder in referring.parents if folder.is_relative_to(ROOT)]]
    return next((folder / path for folder in folders if (folder / path).exists()), None)


@cache
def defined(path):
    """All names that a file defines: `name` at the top level, `Class.name` for methods and attributes of a class."""
    names = set()

    def targets(node):
        if isinstance(node, ast.Assign):
            return node.targets
        return [node.target] if isinstance(node, ast.AnnAssign) else []

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and prefix:
                for target in (target for inner in ast.walk(node) for target in targets(inner)):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        names.add(prefix + target.attr)
            elif isinstance(node, ast.If | ast.Try):
                visit([*node.body, *node.orelse], prefix)
            for target in targets(node):
                names.update(prefix + name.id for name in ast.walk(target) if isinstance(name, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


def wrong_references(path, text, code=(), first=1):
    for number, target, names in references(text, code):
        line = f"{relative(path)}:{first + number - 1}"
        file = resolve(target, path)
        if file is None:
            yield f"{line}: {target}: there is no such file in the repository or in remanence/"
            continue
        for name in names:
            if name not in defined(file):
                yield f"{line}: {target}: {name}: {relative(file)} does not define it"


def wrong_modules(path, text, first=1):
    """Names such as `remanence.ops.memorize`: the module must be there, and the last part in it."""
    for found in re.finditer(r"(?:`|  )(remanence(?:\.\w+)+)", text):
        line = f"{relative(path)}:{first + text[: found.start()].count(chr(10))}"
        place, parts = PACKAGE, found.group(1).split(".")[1:]
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        file = place / "__init__.py"
        if parts and (place / f"{parts[0]}.py").is_file():
            file = place / f"{parts.pop(0)}.py"
        if parts and ".".join(parts) not in defined(file) | exported(file):
            yield f"{line}: {found.group(1)}: {relative(file)} does not define {'.'.join(parts)}"


@cache
def exported(path):
    """Names that a module has from others: imported, or listed in a table of what is imported when first used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    listed = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    return listed | {alias.asname or alias.name for node in imported for alias in node.names}


@cache
def comments(path):
    """(first line, text) of every docstring and comment of a source file."""
    text = path.read_text(encoding="utf-8")
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.append((node.lineno, value.value))
    return found


class TestReferences:
    @pytest.mark.parametrize("path", [*map(named, DOCUMENTS)])
    def test_of_documents(self, path):
        text = path.read_text(encoding="utf-8")
        code = fenced(text.split("\n"))
        wrong = [*wrong_references(path, text, code), *wrong_modules(path, text)]
        assert not wrong, "\n" + "\n".join(wrong)

    @pytest.mark.parametrize("path", [*map(named, DOCUMENTS)])
    def test_of_links(self, path):
        wrong = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                if not re.match(r"[a-z]+:|#", target) and not (path.parent / target.split("#")[0]).exists():
                    wrong.append(f"{relative(path)}:{number}: ({target}): there is no such file")
        assert not wrong, "\n" + "\n".join(wrong)

    def test_of_docstrings_and_comments(self):
        wrong = []
        for path in SOURCES:
            for first, text in comments(path):
                wrong += [*wrong_references(path, text, first=first), *wrong_modules(path, text, first)]
        assert not wrong, "\n" + "\n".join(wrong)

    def test_the_test_finds_what_is_wrong(self):
        """What is right passes, and each kind of mistake is found and named."""
        page = ROOT / "docs" / "page.md"
        right = "`ops/rules.py: RULES, Rule.forget`, runtime/shapes.py and `remanence.ops.memorize`"
        assert not [*wrong_references(page, right), *wrong_modules(page, right)]
        mistakes = {
            "first\n`ops/nowhere.py: x`": "docs/page.md:2: ops/nowhere.py: there is no such file",
            "`ops/rules.py: RULES, Rool`": "docs/page.md:1: ops/rules.py: Rool: remanence/ops/rules.py",
            "`ops/rules.py: Rule.forgett`": "docs/page.md:1: ops/rules.py: Rule.forgett: remanence/ops",
            "see layers.py.": "docs/page.md:1: layers.py: there is no such file",
            "`remanence.ops.memorise`": "docs/page.md:1: remanence.ops.memorise: remanence/ops/__init__.py",
        }
        for text, message in mistakes.items():
            found = [*wrong_references(page, text), *wrong_modules(page, text)]
            assert len(found) == 1 and found[0].startswith(message), found
        block = ["    y = phi(q)      ops/nowhere.py: output"]
        assert len([*wrong_references(page, block[0], [True])]) == 1


def axes(shape):
    """The letters of a shape, without arithmetic, primes, broadcasting, numbers and words."""
    for word in re.findall(r"[A-Za-z]+", shape.replace("..", "")):
        if len(word) <= 2:
            yield from word


def shapes(path):
    """(line, shape) of every annotation of a tensor and every ``[b t d]`` in a docstring or comment."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        index = node.slice if isinstance(node, ast.Subscript) else None
        inside = index.elts if isinstance(index, ast.Tuple) else []
        if len(inside) == 2 and ast.unparse(inside[0]) == "Tensor" and isinstance(inside[1], ast.Constant):
            yield node.lineno, str(inside[1].value)
    for first, text in comments(path):
        for found in re.finditer(r"``\[([^\]`]+)\]``", text):
            yield first + text[: found.start()].count("\n"), found.group(1)


class TestAxes:
    def used(self):
        """(package, letter, where) of every letter in use."""
        for path in sorted(PACKAGE.rglob("*.py")):
            package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            for line, shape in shapes(path):
                for letter in axes(shape.replace("r or 1", "r")):
                    if not (letter.isupper() and "kernels" in path.parts):
                        yield package, letter, f"{relative(path)}:{line}: [{shape.strip()}]"

    def test_every_letter_is_in_the_legend(self):
        used = list(self.used())
        assert len(used) > 500
        known = {package: AXES | ROOM_AXES.get(package, {}) for package, _, _ in used}
        wrong = [f"{where}: {letter!r}" for package, letter, where in used if letter not in known[package]]
        assert not wrong, "not in remanence/runtime/shapes.py:\n" + "\n".join(wrong)

    def test_the_legend_has_no_more(self):
        used = {(package, letter) for package, letter, _ in self.used()}
        assert set(AXES) == {letter for _, letter in used} & set(AXES), "a letter that no shape uses"
        for package, letters in ROOM_AXES.items():
            assert not set(letters) & set(AXES), f"{package}: a letter has one meaning in a package"
            assert set(letters) == {letter for place, letter in used if place == package} & set(letters), (
                package
            )
