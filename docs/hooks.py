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
    markdown = re.sub(r"(?ms)^(```(bash|python)\n)(.*?)^```$", narrow, markdown)
    return re.sub(r"<!-- help: ([a-z ]+) -->", lambda found: help_of(found.group(1)), markdown)


COLUMNS = 84
"""Characters of a line of code on a screen of 1280 pixels, between the navigation and the table of contents."""


def narrow(found):
    """A block of code whose long lines are broken: comments go above their lines, a command's options below it."""
    lines, given = [], found[3].splitlines()
    long = found[2] == "bash" and any(len(line) > COLUMNS for line in given)  # then all comments look alike
    for line in given:
        indent = re.match(" *", line)[0]
        code, _, comment = line.partition("  # ") if long or len(line) > COLUMNS else (line, "", "")
        if comment and code.strip():
            lines.append(f"{indent}# {comment.strip()}")
        line = code.rstrip()
        while found[2] == "bash" and len(line) > COLUMNS and not line.lstrip().startswith("#"):
            cut = line.rfind(" --", len(indent) + 8, COLUMNS - 1)
            if cut < 0 or line[:cut].count('"') % 2 or line[:cut].count("'") % 2:
                break
            lines.append(f"{line[:cut]} \\")
            line = f"    {line[cut + 1 :]}"
        lines.append(line)
    return found[1] + "".join(f"{line}\n" for line in lines) + "```"


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


SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme's `offline` plugin loads for the search of a page opened from the disk. The site fetches nothing from
elsewhere, so assets/worker.js takes its place.
"""


def on_post_page(output, page, config):
    return output.replace(SHIM, f"{'../' * page.file.dest_uri.count('/')}assets/worker.js")


def on_post_template(output_content, template_name, config):
    return output_content.replace(SHIM, "assets/worker.js")
