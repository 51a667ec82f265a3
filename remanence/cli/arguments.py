"""Types of arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

Device = Literal["auto", "cpu", "cuda", "mps"]
Mode = Literal["on", "off", "frozen", "fresh"]
Folder = tyro.conf.Positional[Path]
