"""Law 1 for the kernels: triton = chunked, in every output, every part of the state, and every gradient.

Without a GPU they run under Triton's interpreter, in float64 as everywhere; outputs are allocated full of NaN. The
interpreter must be asked for before Triton is imported, so those tests run in a process of their own.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from cases import Case, pairwise

from remanence import Model, preset
from remanence.ops import MLP, Gates, Rule, clamped, memorize, reset_clamped, start
from remanence.ops.triton import dispatch, memory
from remanence.ops.triton import mlp as fused
from remanence.testing import assert_close, assert_same_function, distance

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("full_of_nan")]


COVER = pairwise(
    norm=[True, False],
    residual=[True, False],
    activation=["gelu", "silu"],
    momentum=[True, False],
    forget=[True, False],
    expansion=[1.5, 5.0],
    chunk=[4, 16, 3],
    tokens=[11, 18],
    blocks=["registers", "streams"],
    heads=[1, 2],
    extreme=["none", "clear", "no past", "no step"],
    quick=[False, True],
)


@pytest.mark.parametrize("s", COVER, ids=lambda s: "-".join(map(str, s.values())))
def test_triton_equals_chunked(s, monkeypatch):
    if s["blocks"] == "streams":
        monkeypatch.setattr(fused, "MAX_HIDDEN_IN_REGISTERS", 8)
        monkeypatch.setattr(fused, "BLOCKS", dict.fromkeys(fused.BLOCKS, 16))
    if s["chunk"] != 4:  # held apart as on long chunks
        tiles = fused.Plan.tiles
        force = lambda *args: {
            name: True if name == "IN_LOOP" else value for name, value in tiles(*args).items()
        }
        monkeypatch.setattr(fused.Plan, "tiles", force)
    if s["quick"]:  # the gates' products as beside bfloat16 operands
        coefficients = fused.Plan.coefficients
        monkeypatch.setattr(
            fused.Plan, "coefficients", lambda *args: {**coefficients(*args), "FROM_LOG_SUMS": True}
        )
    net = MLP(norm=s["norm"], residual=s["residual"], activation=s["activation"], expansion=s["expansion"])
    rule = Rule(momentum=s["momentum"], forget=s["forget"])
    case = Case(
        net=net,
        rule=rule,
        chunk=s["chunk"],
        tokens=s["tokens"],
        batch=1,
        heads=s["heads"],
        extreme=s["extreme"],
    )
    if not net.norm:
        case.step = -6.0
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("offsets", [[0, 3, 3, 13], [0, 13]])
def test_packed_documents(offsets):
    case = Case(net=MLP(expansion=1.5), tokens=13, batch=1, offsets=offsets)
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)


def test_a_call_continues_what_another_began():
    """From inside a chunk, and with gradients through the carried state and its tail."""
    case = Case(net=MLP(expansion=1.5), tokens=11)
    leaves = case.leaves()

    def split(backend):
        def run(q, k, v, *rest):
            gates, (w1, w2), momentum = Gates(*rest[:3]), rest[3:5], rest[5:]
            state = start((w1, w2), 2, chunk=4, momentum=momentum)
            outputs = []
            for part in (slice(0, 6), slice(6, 7), slice(7, 11)):
                piece = Gates(*[gate[:, part] for gate in gates])
                y, state, surprise = memorize(
                    q[:, part], k[:, part], v[:, part], piece, state, net=case.net, chunk=4, backend=backend
                )
                outputs += [y, surprise]
            return (*outputs, *state.layers, state.k, state.position)

        return run

    assert_same_function(split("chunked"), split("triton"), leaves, tolerance=1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("blocks", ["registers", "streams"])
@pytest.mark.parametrize("width", [16, 32])
def test_float32_is_as_exact_as_torch(width, blocks, monkeypatch):
    if blocks == "streams":
        monkeypatch.setattr(fused, "MAX_HIDDEN_IN_REGISTERS", 8)
        monkeypatch.setattr(fused, "BLOCKS", dict.fromkeys(fused.BLOCKS, 16))
    case = Case(net=MLP(expansion=1.0), width=width, tokens=40, chunk=16, batch=1, heads=1, step=-5.0)
    exact = case.leaves()
    weights = None
    found = {}
    for backend, dtype in (
        ("reference", torch.float64),
        ("chunked", torch.float32),
        ("triton", torch.float32),
    ):
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
        y, surprise, new = case.call(backend)(*leaves)
        outputs = [y, surprise, *new.layers]
        weights = weights or [torch.randn_like(x) for x in outputs]
        loss = sum((x * w.to(dtype)).sum() for x, w in zip(outputs, weights, strict=True))
        found[backend] = [x.double() for x in (*outputs, *torch.autograd.grad(loss, leaves))]
    for index, (true, plain, ours) in enumerate(zip(*found.values(), strict=True)):
        assert distance(true, ours) <= 2 * distance(true, plain) + 1e-6, f"result {index}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("largest", [1e30, 2.5e21], ids=["by reach", "by end"])
@pytest.mark.parametrize("blocks", ["registers", "streams"])
def test_the_leash_holds_as_chunked_does(blocks, largest, monkeypatch):
    """Equal keys and a full step: the carried gradient outgrows float32, and is held at the same length."""
    if blocks == "streams":
        monkeypatch.setattr(fused, "MAX_HIDDEN_IN_REGISTERS", 8)
        monkeypatch.setattr(fused, "BLOCKS", dict.fromkeys(fused.BLOCKS, 16))
    # A reach that is exceeded in most chunks, in float64, where both tiers agree to many digits.
    monkeypatch.setattr(torch, "finfo", lambda dtype: type("Short", (), {"eps": 30.0, "max": largest}))
    case = Case(net=MLP(expansion=5.0), tokens=40, chunk=4, batch=1, heads=1, step=3.0)
    leaves = case.leaves()
    leaves[1] = leaves[1].detach()[:, :1].expand_as(leaves[1]).contiguous().requires_grad_()
    assert_same_function(case.call("chunked"), case.call("triton"), leaves, tolerance=1e-8)
    assert [held(case, leaves, backend) for backend in ("chunked", "triton")] == [1, 1]


def held(case, leaves, backend):
    """What one call's backward adds to the count."""
    reset_clamped()
    y, surprise, new = case.call(backend)(*leaves)
    torch.autograd.grad(y.sum() + surprise.sum() + sum(layer.sum() for layer in new.layers), leaves)
    return clamped()


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_only_held_gradients_are_counted(depth):
    case = Case(net=MLP(depth=depth, expansion=1.5), tokens=40, chunk=4, batch=2, heads=2)
    assert [held(case, case.leaves(), backend) for backend in ("chunked", "triton")] == [0, 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", [True, False])
def test_the_compiler_sees_one_operator(norm, monkeypatch):
    """torch's own checks of it, and a compiled function that calls it, whole."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64).mul_(0.3).requires_grad_()
    gates = [make(1, 8, 1).detach().abs().neg().requires_grad_() for _ in range(3)]
    leaves = [*[make(1, 8, 1, 4) for _ in range(3)], *gates, make(1, 2, 4, 6), make(1, 2, 6, 4)]
    plan = (4, 6, 4, 1, True, True, norm, True, True, "ieee", 0, 1)
    totals = torch.tensor([8], dtype=torch.int32)

    def loss(q, *rest):
        y, surprise, end1, end2, *_ = fused.memory_forward(1.5 * q, *rest, totals, True, *plan)
        return y.square().sum() + surprise.sum() + end1.sin().sum() + end2.sum()

    torch.library.opcheck(fused.memory_forward, (*leaves, totals, True, *plan))
    true = torch.autograd.grad(loss(*leaves), leaves)
    for backend in ("eager", "aot_eager"):
        found = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*leaves), leaves)
        assert all(torch.equal(a, b) for a, b in zip(true, found, strict=True))
    monkeypatch.setattr(torch, "finfo", lambda dtype: type("Short", (), {"eps": 1e9, "max": 1e30}))
    reset_clamped()
    torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    assert clamped() == 1, "compiled, it still counts"


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_divergence_raises_the_flag(backend):
    q, k, v = torch.randn(3, 2, 40, 1, 4)
    v[0] = 1e18  # stored in the first chunk, its square met in the second
    gates = Gates(*[torch.full((2, 40, 1), value) for value in (0.0, -0.1, 0.0)])
    gates.log_step[1] = -4.0  # or this net, which is not stable, would diverge in the other row as well
    net = MLP(norm=False)
    state = start(net.init(1, 4), 2, chunk=16)
    y, state, _ = memorize(q, 0.1 * k, v, gates, state, net=net, chunk=16, backend=backend)
    assert state.diverged.tolist() == [True, False]
    assert y[1].isfinite().all()


def test_what_it_cannot_run_is_said():
    case = Case(net=MLP(depth=3))
    with pytest.raises(ValueError, match="depth 2"):
        case.call("triton")(*case.leaves())


def one_call(leaves, case, change=lambda y: y):
    y, surprise, new = case.call("triton")(*leaves)
    return change(y).square().sum() + surprise.sum() + new.layers[0].sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize("net", [MLP(expansion=1.5), MLP(depth=1, norm=False)], ids=["two layers", "one"])
@pytest.mark.parametrize("offsets", [None, [0, 9, 9, 23]])
def test_a_long_call_without_gradients_goes_piece_by_piece(net, offsets, monkeypatch):
    monkeypatch.setattr(memory, "PIECE_CHUNKS", 2)
    case = Case(net=net, tokens=23, batch=1 if offsets else 2, heads=1, offsets=offsets)
    leaves = [x.detach() for x in case.leaves()]
    assert_close(case.call("chunked")(*leaves), case.call("triton")(*leaves), 1e-10)


@pytest.mark.parametrize("net", [MLP(expansion=1.5), MLP(depth=1, norm=False)], ids=["two layers", "one"])
class TestAsAUserMay:
    def test_checkpointing(self, net):
        """Which hands out what was saved a single time."""
        case = Case(net=net, tokens=6, batch=1, heads=1)
        leaves = case.leaves()
        true = torch.autograd.grad(one_call(leaves, case), leaves)
        again = torch.utils.checkpoint.checkpoint(lambda *x: one_call(x, case), *leaves, use_reentrant=False)
        assert all(torch.equal(a, b) for a, b in zip(true, torch.autograd.grad(again, leaves), strict=True))

    @pytest.mark.parametrize("aligned", [True, False])
    def test_results_may_be_changed_in_place(self, net, aligned):
        case = Case(net=net, tokens=6, batch=1, heads=1, aligned=aligned)
        leaves = case.leaves()
        true = torch.autograd.grad(one_call(leaves, case, lambda y: 2.0 * y), leaves)
        found = torch.autograd.grad(one_call(leaves, case, lambda y: y.mul_(2.0)), leaves)
        assert all(torch.equal(a, b) for a, b in zip(true, found, strict=True))

    def test_a_second_derivative_is_refused(self, net):
        case = Case(net=net, tokens=6, batch=1, heads=1)
        leaves = case.leaves()
        first = torch.autograd.grad(one_call(leaves, case), leaves[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(first[0].sum(), leaves[:1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 11]])
def test_a_carried_call_compiles_without_a_break(offsets):
    case = Case(net=MLP(expansion=1.5), tokens=11, batch=1, heads=1, offsets=offsets)
    leaves = case.leaves()
    with ThreadPoolExecutor(1) as aside:
        compiled = torch.compile(case.call("triton"), backend="eager", fullgraph=True)
        y = aside.submit(lambda: compiled(*leaves)[0]).result()
    assert distance(case.call("triton")(*leaves)[0], y) < 1e-12


def test_a_whole_model_compiles_without_a_break(monkeypatch):
    """Every variant's layer in one model, on the kernels; fullgraph makes a break an error."""
    monkeypatch.setattr(dispatch, "memory_backend", lambda *_: "triton")
    pattern = ("lmm", "mag", "mal", "mac", "gated_delta")
    model = Model(
        preset(
            "tiny",
            pattern,
            num_layers=len(pattern),
            dim=16,
            heads=1,
            memory={"heads": 1, "chunk": 8},
            segment=8,
            window=8,
        )
    )
    tokens = torch.randint(0, model.config.vocab_size, (1, 18))

    def results(call):
        y = call(tokens)[0]
        return y, *torch.autograd.grad(y.square().mean(), list(model.parameters()))

    # In a thread of its own, which does not have the tests' device mode: the compiler does not see through that.
    with ThreadPoolExecutor(1) as aside:
        found = aside.submit(results, torch.compile(model, backend="aot_eager", fullgraph=True)).result()
    names = ["logits", *dict(model.named_parameters())]
    for name, true, x in zip(names, results(model), found, strict=True):
        assert distance(true, x) < 1e-4, name
