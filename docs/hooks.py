"""What the site has beside the pages of this folder: the notebooks of ``examples``, and every command's help."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent


def on_files(files, config):
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=from_notebook(path)))
    return files


def from_notebook(path):
    """A notebook as a page: its texts, its code and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.append(f"The notebook is `examples/{path.name}`.")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown, page, config, files):
    markdown = re.sub(r"\(\.\./examples/(\w+)\.ipynb\)", r"(notebooks/\1.md)", markdown)
    return re.sub(r"<!-- help: ([a-z ]+) -->", lambda found: help_of(found.group(1)), markdown)


def help_of(command):
    """``remanence COMMAND --help``, as plain text."""
    from remanence import cli

    os.environ.update(COLUMNS="96", NO_COLOR="1")
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    plain = re.sub(
        r"\n *[-─]{9,} *(?=\n)", "", cli.COLOURS.sub("", told.getvalue()).strip()
    )  # no rules below headings
    return f"```text\n{plain}\n```"
