"""Law 1 for the kernels of a one-layer memory: triton = chunked, in every output, every part of the state, and every gradient.

As in test_triton.py: without a GPU under Triton's interpreter, in float64, in a process of its own, outputs full of NaN.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from cases import Case, pairwise

from remanence.ops import MLP, RULES, Gates, Rule, fused_linear, memorize, start
from remanence.testing import assert_same_function, distance

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _full_of_nan(monkeypatch):
    """An element that no kernel writes must show."""
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)

        def filled(*args, made=made, **kwargs):
            x = made(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, filled)


@pytest.fixture
def _narrow(monkeypatch):
    """Columns of the state shared out among programs, and among rounds of the parallel kernels."""
    monkeypatch.setattr(fused_linear, "COLUMNS", 16)


KINDS = {
    "batch": (False, {}),
    "batch LN": (True, {}),
    "batch dot": (False, {"loss": "dot"}),
    "batch LN dot": (True, {"loss": "dot"}),
    "exact": (False, {"anchor": "token"}),
    "exact dot": (False, {"anchor": "token", "loss": "dot"}),
    "decayed": (False, {"anchor": "token", "decay_first": True}),
    "decayed dot": (False, {"anchor": "token", "loss": "dot", "decay_first": True}),
}

COVER = pairwise(
    kind=list(KINDS),
    residual=[True, False],
    momentum=[True, False],
    forget=[True, False],
    chunk=[4, 16, 20, 3],
    tokens=[11, 18],
    heads=[1, 2],
    width=[4, 20, 16],
    extreme=["none", "clear", "no past", "no step"],
)


@inside
@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("s", COVER, ids=lambda s: "-".join(map(str, s.values())))
def test_triton_equals_chunked(s):
    norm, settings = KINDS[s["kind"]]
    net = MLP(depth=1, norm=norm, residual=s["residual"])
    rule = Rule(momentum=s["momentum"], forget=s["forget"] or "decay_first" in settings, **settings)
    case = Case(
        net=net, rule=rule, chunk=s["chunk"], tokens=s["tokens"] + s["chunk"], batch=1, heads=s["heads"], width=s["width"],
        extreme=s["extreme"],
    )  # fmt: skip
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)
