"""Every test of the kernels that needs no GPU, under Triton's interpreter. That must be asked for before Triton is
imported, so they run in processes of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
COVERS = [
    ("ops/test_triton.py", "equals"),
    ("ops/test_triton.py", "not equals"),
    ("ops/test_triton_linear.py", ""),
    ("ops/test_triton_layer.py", ""),
    ("ops/test_decode.py", ""),
    ("ops/test_nearest.py", ""),
    ("test_decoding.py", ""),
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("tier", ["fast", pytest.param("slow", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("file", "some"), COVERS)
def test_under_the_interpreter(file, some, tier):
    """The sampled cases in the slow tier, the others in the exhaustive one."""
    options = ["--tier", tier, "-x", "-p", "no:cacheprovider", "-k", some]
    command = [sys.executable, "-m", "pytest", str(ROOT / file), *options]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED if tier == "slow" else 0
    assert done.returncode in (0, nothing), done.stdout[-4000:] + done.stderr[-2000:]


def test_every_file_is_among_them():
    marked = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("test_*.py")
        if "mark.interpreted" in file.read_text()
    }
    assert marked - {Path(__file__).name} == {file for file, _ in COVERS}
