"""README as an index page shows it: there, a link to a file of the repository leads nowhere.

With REMANENCE_HOME, the address of the repository, such links and pictures become absolute, to the files of this
version. Without it they are left out, and their words stay.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, home: str | None, version: str) -> str:
    """A README with its links to files made absolute, or left out."""

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if not home:
            return f"*{words}*" if picture else words
        place = f"{home.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{path}"
        return f"{picture}[{words}]({place})"

    return LINK.sub(link, text)


class Readme(MetadataHookInterface):
    """Called by hatchling when it builds."""

    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        version = re.search(r'__version__ = "(.+)"', (root / "remanence" / "__init__.py").read_text())[1]
        text = (root / "README.md").read_text(encoding="utf-8")
        text = absolute(text, os.environ.get("REMANENCE_HOME"), version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
