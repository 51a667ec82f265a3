"""Which path a call takes is decided in one place, which says why; nothing but ops/triton imports Triton."""

import ast
import importlib.util
import logging
from pathlib import Path

import pytest
import torch

import remanence
from remanence.ops import MLP, NETS, RULES, Gates, Rule, memorize, start
from remanence.ops.triton import dispatch

PACKAGE = Path(remanence.__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def on_cuda(dtype=torch.bfloat16, count=1):
    """A tensor as far as `layer_reason` looks at it."""
    return type("OnCuda", (), {"is_cuda": True, "dtype": dtype, "numel": lambda self: count})()


def memory(
    net=NETS["titans"],
    rule=RULES["titans"],
    width=64,
    values=64,
    chunk=64,
    dtype=torch.bfloat16,
    device="cuda",
):
    return dispatch.memory_kind_reason(net, rule, width, values, chunk, dtype, torch.device(device))


def test_only_ops_triton_imports_triton():
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "ops" / "triton"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "triton" for name in names), path
            assert not any(name.startswith("remanence.ops.triton.kernels") for name in names), path


@needs_triton
def test_memories_that_have_kernels():
    for net in (NETS["titans"], NETS["residual"], MLP(depth=1), NETS["linear"]):
        assert memory(net) is None
    for rule in ("delta", "gated_delta", "linear_attention"):
        assert memory(NETS["linear"], RULES[rule]) is None
    assert memory(NETS["linear"], width=128, values=16, chunk=1, dtype=torch.float32) is None


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"net": MLP(depth=3)}, "depth 1 and depth 2 without bias"),
        ({"net": MLP(bias=True)}, "depth 1 and depth 2 without bias"),
        ({"net": MLP(depth=1), "rule": Rule(decay_first=True)}, "decay_first only anchored at the token"),
        ({"rule": Rule(loss="dot")}, "the squared loss, anchored at the chunk's start"),
        ({"width": 129}, "head widths up to 128, got 129"),
        ({"chunk": 129}, "chunks up to 128, got 129"),
        ({"device": "cpu"}, "run on CUDA (or under TRITON_INTERPRET=1), got cpu"),
        ({"dtype": torch.float64}, "compute in float32, got float64"),
    ],
)
def test_memories_that_have_none(changes, reason):
    assert reason in memory(**changes)


@needs_triton
def test_parts_of_a_layer():
    assert (
        dispatch.layer_reason(on_cuda(), width=256, taps=16, gates=128, features=512, channels=8192) is None
    )
    assert "CUDA" in dispatch.layer_reason(torch.zeros(1, device="cpu"))
    assert "float32 and bfloat16" in dispatch.layer_reason(on_cuda(torch.float64))
    assert "no tokens" in dispatch.layer_reason(on_cuda(count=0))
    for size, most in (("width", 256), ("taps", 16), ("gates", 128), ("features", 512), ("channels", 8192)):
        assert f"got {most + 1}" in dispatch.layer_reason(on_cuda(), **{size: most + 1})


@needs_triton
def test_one_switch_turns_all_of_them_off(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", ())
    x = torch.zeros(1, 1, 1, 4)
    reasons = [
        memory(),
        dispatch.layer_reason(on_cuda()),
        dispatch.decode_reason(x, 4),
        dispatch.search_reason(x, x),
    ]
    assert reasons == [dispatch.OFF] * 4


def test_the_choice_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    q, gate = torch.randn(3, 1, 5, 1, 4, device="cpu"), torch.full((1, 5, 1), -1.0, device="cpu")
    weights = tuple(weight.to("cpu") for weight in MLP().init(1, 4))
    with caplog.at_level(logging.INFO, "remanence"):
        for _ in range(2):
            memorize(*q, Gates(gate, gate, gate), start(weights, 1))
    assert [record.message for record in caplog.records] == ["memory operator: backend chunked"]
