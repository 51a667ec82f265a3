"""experiments/dynamics/steadiness.py in small: its tables are whole, and what holds by design holds there too."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_quick_run_fills_all_tables(tmp_path):
    out = tmp_path / "steadiness.json"
    command = [
        sys.executable,
        "-m",
        "experiments.dynamics.steadiness",
        "all",
        "--quick",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tables = json.loads(out.read_text())
    assert list(tables) == ["twins", "plasticity", "capacity"]
    for part, rows in tables.items():
        assert len({tuple(row) for row in rows}) == 1, part  # the same columns in every row
        assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
        assert done.stdout.count("\n" + rows[0]["memory"]) >= 1

    twins = tables["twins"]
    assert {f"{what} {tokens}" for what in ("states", "logits") for tokens in (1024, 2048)} < set(twins[0])
    assert all(row["holds"] and row["largest"] <= 1e-6 for row in twins if row["memory"] == "deep")

    plasticity = tables["plasticity"]
    assert [(row["memory"], row["begin"]) for row in plasticity] == [
        (kind, begin) for kind in ("deep", "matrix", "titans") for begin in ("fresh", "passed")
    ]
    read = [f"{kind} {tokens}" for tokens in (64, 128) for kind in ("noise", "repeated", "random")]
    assert all(row["least"] == min(row[name] for name in read) for row in plasticity)

    capacity = tables["capacity"]
    assert [row["KiB"] for row in capacity if row["memory"].startswith("matrix")] == [16, 32, 64] * 2
    assert all(0 <= row[f"right of {n}"] <= 1 for row in capacity for n in (32, 64))
    assert next(row for row in capacity if row["memory"] == "matrix 128 x 128")["right of 64"] == 1.0
