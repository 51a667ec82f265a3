"""What holds of the deep memory by design, for any text and any gates."""

import re
from math import exp

import pytest
import torch
import torch.nn.functional as F

from remanence import Model, ModelConfig, NeuralMemory
from remanence.memory.components import apply_threshold
from remanence.ops import NETS, RULES, Deep, Gates, memorize, start
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(4)

NET, RULE = NETS["deep"].fast, RULES["gated_delta"]


def _gates(kind: str, shape: tuple[int, ...]) -> Gates:
    """Log step and log keep ``[b t h]``."""
    noise = torch.randn(2, *shape, dtype=torch.float64)
    if kind == "random":
        step, keep = F.logsigmoid(4 * noise)
    elif kind == "extreme":  # nothing or all of it, written and kept
        step, keep = torch.where(noise > 0, 0.0, -torch.inf).to(torch.float64)
    else:
        step, keep = F.logsigmoid(noise[0] + 4), F.logsigmoid(noise[1] - float(kind))
    return Gates(step, None, keep)


@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize("gates", ["-10", "-5", "-3", "random", "extreme"])
def test_neither_a_difference_nor_its_adjoint_grows(gates, keys):
    torch.manual_seed(0)
    b, t, h, e = 2, 150, 2, 8
    q, k, v = (torch.randn(b, t, h, e, dtype=torch.float64) for _ in range(3))
    k = F.normalize(k if keys == "random" else k[:, :1].expand_as(k), dim=-1)
    log = _gates(gates, (b, t, h))
    weights, moved = (torch.randn(h, e, e, dtype=torch.float64) for _ in range(2))

    def end(weight):
        state = start((weight,), b, rule=RULE, chunk=16)
        _, state, _ = memorize(F.normalize(q, dim=-1), k, v, log, state, net=NET, rule=RULE, chunk=16)
        return state.layers[0]

    difference = end(weights + moved) - end(weights)
    assert (difference.flatten(2).norm(dim=-1) <= moved.flatten(1).norm(dim=-1) * (1 + 1e-12)).all()
    weights.requires_grad_()
    back = torch.randn(b, h, 1, e, e, dtype=torch.float64)
    # One row at a time: the rows share their initial weights, whose gradients add up.
    for row in range(b):
        (g,) = torch.autograd.grad(end(weights)[row], weights, back[row])
        assert (g.flatten(1).norm(dim=-1) <= back[row].flatten(1).norm(dim=-1) * (1 + 1e-12)).all()


def _model(depth: int = 2, chunk: int = 16, forget: float = -5.0, trained: bool = False) -> Model:
    torch.manual_seed(1)
    memory = {"heads": 2, "depth": depth, "chunk": chunk, "forget_bias": forget}
    model = Model(
        ModelConfig(
            vocab_size=17,
            dim=32,
            num_layers=2,
            heads=2,
            pattern=("lmm",),
            segment=128,
            persistent=0,
            memory=memory,
        )
    )
    if trained:  # gates that open and shut, features that bend
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".gates.weight" in name or ".down" in name or ".up" in name:
                    parameter.copy_(torch.randn_like(parameter) * (2.0 if ".gates" in name else 0.5))
    return model.double()


@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize(
    ("depth", "chunk", "forget"),
    [(1, 16, -10.0), (2, 16, -3.0), (2, 128, -5.0), (3, 64, -7.0), (4, 32, -10.0)],
)
def test_twins_stay_twins(depth, chunk, forget, trained):
    """Two models that differ by 1e-6 in their memories and read the same text are as near to one another afterwards."""
    model = _model(depth, chunk, forget, trained)
    text = torch.randint(17, (1, 4096))
    with torch.no_grad():
        _, state = model(text[:, :512])

        def moved(block):
            layers = tuple(
                w + 1e-6 * w.norm() * F.normalize(torch.randn_like(w).flatten(), dim=0).view_as(w)
                for w in block.memory.layers
            )
            return block._replace(memory=block.memory._replace(layers=layers))

        twin = state._replace(blocks=tuple(moved(block) for block in state.blocks))
        for at in range(512, 4096, 512):
            logits, state = model(text[:, at : at + 512], state)
            other, twin = model(text[:, at : at + 512], twin)
    for one, two in zip(state.blocks, twin.blocks, strict=True):
        for a, b in zip(one.memory.layers, two.memory.layers, strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm()
    assert (logits - other).norm() <= 1e-5 * logits.norm()


def test_the_chunk_is_a_detail():
    text = torch.randint(17, (2, 300))
    logits = [_model(chunk=chunk, trained=True)(text)[0] for chunk in (1, 16, 64, 128)]
    for other in logits[1:]:
        assert (logits[0] - other).abs().max() < 1e-10


def test_an_untrained_deep_memory_is_a_matrix():
    torch.manual_seed(0)
    deep = NeuralMemory(dim=24, heads=2, depth=3).double()
    matrix = NeuralMemory(dim=24, heads=2, depth=1).double()
    assert not matrix.load_state_dict(deep.state_dict(), strict=False).missing_keys
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    assert (deep(x)[0] - matrix(x)[0]).abs().max() < 1e-10


def test_what_training_left_is_never_forgotten():
    """A memory cleared at every token answers from its learned part alone."""
    memory = NeuralMemory(dim=16, heads=2, forget_bias=200.0, step_bias=-200.0).double()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    y, state = memory(x)
    assert state.memory.weights[0].abs().max() == 0
    assert y.abs().max() > 0
    assert (y - memory.read(x, memory.start(1, torch.float64))).abs().max() < 1e-12
    (grad,) = torch.autograd.grad(memory(x, state)[0].square().sum(), list(memory.initial.parameters()))
    assert grad.abs().max() > 0, "and is trained where the state is carried, too"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"net": "deep", "activation": "silu"},
            "activation: expected None, as the net 'deep' has no activation, got 'silu'",
        ),
        ({"net": "deep", "depth": 5}, "depth: expected 1, 2, 3 or 4 layers, got 5"),
        ({"net": "dep"}, "did you mean 'deep'?"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        NeuralMemory(dim=16, **fields)


def test_the_operator_is_given_what_is_written():
    q, gate = torch.randn(1, 2, 1, 4), torch.zeros(1, 2, 1)
    state = start(NET.init(1, 4), 1, rule=RULE)
    with pytest.raises(ValueError, match="net: expected the fast weights' net of a memory with features"):
        memorize(q, q, q, Gates(gate, None, gate), state, net=Deep(), rule=RULE)


def test_a_net_brings_its_own_defaults():
    titans = NeuralMemory(dim=128, net="titans").config
    assert (titans.rule, titans.chunk, titans.forget_bias, titans.shape) == ("titans", 16, -10.0, (2, 64))
    deep = NeuralMemory(dim=128).config
    assert (deep.net, deep.rule, deep.chunk, deep.forget_bias, deep.shape) == (
        "deep",
        "gated_delta",
        64,
        -6.0,
        (1, 128),
    )
    changed = NeuralMemory(deep, net="titans", conv=2).config
    assert (changed.rule, changed.chunk, changed.conv, changed.step_bias) == ("titans", 16, 2, None)
    model = ModelConfig(vocab_size=9, dim=32, num_layers=1, segment=48)
    assert model.memory.chunk == 16, "the largest that a segment is a multiple of"


class TestThreshold:
    """A memory that passes over tokens without a trace."""

    def test_the_gates_are_those_of_the_formula(self):
        torch.manual_seed(0)
        plain = NeuralMemory(dim=16, heads=2).double()
        memory = NeuralMemory(dim=16, heads=2, threshold=0.45).double()
        memory.load_state_dict(plain.state_dict())
        x = 30 * torch.randn(2, 50, 16, dtype=torch.float64)
        with torch.no_grad():
            for each in (plain, memory):
                each.gates.weight.mul_(50)
        step, _, keep = plain.log_gates(x)
        share = ((step.exp() - 0.45) / 0.55).clamp_min(0)
        assert 0.2 < (share == 0).double().mean() < 0.8
        found = memory.log_gates(x)
        assert_close(found.log_step.exp(), share, 1e-12)
        assert_close(found.log_keep.exp(), keep.exp() ** share, 1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_what_is_passed_over_leaves_the_memory_as_it_was_to_the_bit(self, dtype):
        memory = NeuralMemory(dim=16, heads=2, threshold=0.1, chunk=16).to(dtype)
        _, state = memory(torch.randn(2, 64, 16, dtype=dtype))
        with torch.no_grad():
            memory.gates.bias[:2] = -4.0
        text = torch.randn(2, 160, 16, dtype=dtype)
        _, after = memory(text, state)
        assert state.memory.weights[0].abs().max() > 0
        assert torch.equal(memory.current_weights(after)[0], memory.current_weights(state)[0])
        _, after = memory(text[:, :1], after)
        assert torch.equal(memory.current_weights(after)[0], memory.current_weights(state)[0])

    def test_gradients_are_finite_and_none_where_nothing_is_written(self):
        logs = torch.tensor([-9.0, -0.7, -0.6, -0.2], dtype=torch.float64).view(1, 4, 1).requires_grad_()
        keep = torch.full((1, 4, 1), -1e-2, dtype=torch.float64).requires_grad_()
        gates = apply_threshold(Gates(logs, None, keep), exp(-0.65))
        (gates.log_step.exp() + gates.log_keep).sum().backward()
        assert logs.grad.isfinite().all() and keep.grad.isfinite().all()
        assert [bool(each) for each in logs.grad.flatten()] == [False, False, True, True]
        assert [bool(each) for each in keep.grad.flatten()] == [False, False, True, True]

    @pytest.mark.parametrize("value", [-0.1, 1, float("nan"), "much", True])
    def test_what_is_no_threshold(self, value):
        with pytest.raises(ValueError, match="threshold: expected at least 0 and below 1, got"):
            NeuralMemory(dim=16, threshold=value)
