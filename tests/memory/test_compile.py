"""torch.compile of a layer: the same function, whole, and not compiled again because its rows stand elsewhere."""

import pytest
import torch
from compiling import assert_same, whole

from remanence import NeuralMemory
from remanence.ops import layer_cpu, opaque

KINDS = {
    "default": {},
    "titans": {"net": "titans"},
    "bias": {"net": "titans", "rule": "no_momentum", "depth": 3, "bias": True},
    "deep with momentum": {"rule": "titans", "depth": 3},
    "linear": {"net": "linear"},
    "no conv": {"net": "titans", "conv": 0, "rule": "no_forget"},
}


def layer(kind="default", dtype=torch.float64):
    torch.manual_seed(1)
    memory = NeuralMemory(**{"dim": 12, "heads": 2, "chunk": 4, "expansion": 2.0, **KINDS[kind]})
    if memory.features is not None:  # as if trained: they start as nothing
        for _, down in memory.features.layers:
            torch.nn.init.normal_(down)
    return memory.to(dtype)


def tokens(batch=2, count=21, dtype=torch.float64):
    return torch.randn(batch, count, 12, dtype=dtype)


def read(memory, inputs):
    """Several calls, each from the state of the one before: all that comes out, and the gradients of the inputs and
    parameters through the states between the calls, too.
    """

    def run(call):
        outputs, state = [], None
        for x in inputs:
            y, state = call(x, state)
            outputs += [y, *state.tensors()]
        loss = sum((y.sin() if y.is_floating_point() else y.detach()).sum() for y in outputs)
        return [*outputs, *torch.autograd.grad(loss, [*inputs, *memory.parameters()], allow_unused=True)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_eager(kind, aside):
    """From the start, inside a chunk, at its border, over several."""
    memory = layer(kind)
    inputs = [tokens(count=count).requires_grad_() for count in (3, 1, 21)]
    run = read(memory, inputs)
    assert_same(run(memory), aside(run, whole(memory)))


@pytest.mark.slow
def test_many_chunks(aside, monkeypatch):
    """More than are walked at once, so that states are kept on the way."""
    monkeypatch.setattr(opaque, "BLOCK_CHUNKS", 2)
    for kind in ("default", "titans"):
        memory = layer(kind)
        run = read(memory, [tokens(count=count).requires_grad_() for count in (30, 27)])
        assert_same(run(memory), aside(run, whole(memory)))


@pytest.mark.slow
def test_positions_are_not_compiled(aside):
    """Calls of one length from any position, rows apart from one another too: compiled once."""
    memory = layer()
    compiled = whole(memory)
    states = [memory(tokens(1, count))[1].detach() for count in range(1, 10)]
    x = tokens(2, 6)

    def ask(pair, stance="fail_on_recompile"):
        with torch.no_grad(), torch.compiler.set_stance(stance):
            return compiled(x, type(pair[0]).concat(pair))[0]

    aside(ask, states[:2], "default")
    for pair in zip(states, states[::-1], strict=True):
        assert_same([memory(x, type(pair[0]).concat(pair))[0]], [aside(ask, pair)])


def test_a_layers_operators_are_torchs():
    """torch's own checks of what stands around the memory, with keys narrower than float32, too."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, device="cpu").requires_grad_()
    x, heads = make(2, 5, 8), make(2, 5, 2, 4)
    torch.library.opcheck(layer_cpu.short_conv_forward, (x, make(2, 3, 8), make(8, 4), 2, True))
    torch.library.opcheck(layer_cpu.short_conv_forward, (x, make(2, 3, 8), make(8, 4), 2, False))
    torch.library.opcheck(layer_cpu.log_gates_forward, (x, make(6, 8), make(6), 2, 0b101))
    torch.library.opcheck(layer_cpu.gated_norm_forward, (heads, x, make(4), 1e-6))
    torch.library.opcheck(layer_cpu.key_features_forward, (heads, make(2, 4, 6), make(2, 3, 4)))
    for length in (3, 5, 9):
        torch.library.opcheck(layer_cpu.roll_history_forward, (make(2, length, 8), x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "titans"])
def test_autocast(kind, aside):
    """bfloat16 around a float32 memory, as eager has it."""
    memory = layer(kind, torch.float32)
    x = tokens(dtype=torch.float32)

    def run(call):
        with torch.autocast("cpu", torch.bfloat16):
            y, state = call(x)
        grads = torch.autograd.grad(y.float().square().mean(), list(memory.parameters()), allow_unused=True)
        return [y, *state.tensors(), *grads]

    assert_same(run(memory), aside(run, whole(memory)), 2e-2)
