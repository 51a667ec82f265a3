"""Law 1 for the kernels of a one-layer memory: triton = chunked, in every output, every part of the state, and every
gradient.

As in test_triton.py: without a GPU under Triton's interpreter, in float64, in a process of its own, outputs full of
NaN.
"""

import pytest
import torch
from cases import Case, pairwise

from remanence.ops import MLP, NETS, RULES, Gates, Rule, chunked, clamped, memorize, reset_clamped, start
from remanence.ops.triton import linear as fused_linear
from remanence.testing import assert_same_function, distance

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("full_of_nan")]


@pytest.fixture
def _narrow(monkeypatch):
    """Columns of the state shared out among programs, and among rounds of the parallel kernels."""
    monkeypatch.setattr(fused_linear, "MAX_COLUMNS", 16)


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
    heads=[1, 2],
    width=[4, 20, 16],
    extreme=["none", "clear", "no past", "no step"],
)


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("s", COVER, ids=lambda s: "-".join(map(str, s.values())))
def test_triton_equals_chunked(s):
    norm, settings = KINDS[s["kind"]]
    net = MLP(depth=1, norm=norm, residual=s["residual"])
    rule = Rule(momentum=s["momentum"], forget=s["forget"] or "decay_first" in settings, **settings)
    case = Case(
        net=net, rule=rule, chunk=s["chunk"], tokens=2 * s["chunk"] + 2, batch=1, heads=s["heads"], width=s["width"],
        extreme=s["extreme"],
    )  # fmt: skip
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)


@pytest.mark.sample(4)
@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("values", [3, 16, 40])
@pytest.mark.parametrize("kind", ["batch", "exact", "decayed", "decayed dot"])
def test_values_may_have_another_width_than_the_keys_of_a_matrix(kind, values):
    rule = Rule(momentum=kind != "decayed", **KINDS[kind][1])
    case = Case(net=NETS["linear"], rule=rule, chunk=16, tokens=34, batch=1, heads=2, width=20, values=values)
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)


@pytest.mark.parametrize("name", ["titans", "delta", "gated_delta", "linear_attention"])
def test_packed_documents(name):
    case = Case(net=NETS["linear"], rule=RULES[name], tokens=11, batch=1, heads=1, offsets=[0, 2, 2, 11])
    assert_same_function(case.call("chunked"), case.call("triton"), case.leaves(), tolerance=1e-10)


@pytest.mark.parametrize("kind", ["batch LN", "decayed"])
def test_a_call_continues_what_another_began(kind):
    """From inside a chunk, and with gradients through the carried state and its tail."""
    norm, settings = KINDS[kind]
    case = Case(net=MLP(depth=1, norm=norm), rule=Rule(**settings), tokens=11, batch=1, heads=1)
    leaves = case.leaves()

    def split(backend):
        def run(q, k, v, *rest):
            gates, (weight,), momentum = Gates(*rest[:3]), rest[3:4], rest[4:]
            state = start((weight,), 1, rule=case.rule, chunk=4, momentum=momentum)
            outputs = []
            for part in (slice(0, 6), slice(6, 7), slice(7, 11)):
                piece = Gates(*[gate[:, part] for gate in gates])
                y, state, surprise = memorize(
                    q[:, part],
                    k[:, part],
                    v[:, part],
                    piece,
                    state,
                    net=case.net,
                    rule=case.rule,
                    chunk=4,
                    backend=backend,
                )
                outputs += [y, surprise]
            return (*outputs, *state.layers, state.k, state.position)

        return run

    assert_same_function(split("chunked"), split("triton"), leaves, tolerance=1e-10)


@pytest.mark.parametrize("chunk", [64, 128])
def test_the_solver_merges_blocks_as_torch_solves(chunk):
    """The whole of a long chunk's system, on keys of which some repeat."""
    case = Case(
        net=NETS["linear"], rule=Rule(anchor="token"), tokens=chunk, chunk=chunk, batch=1, heads=1, step=2.0
    )
    leaves = case.leaves()
    with torch.no_grad():
        leaves[1][:, 5:40] = leaves[1][:, 5:6]
    assert_same_function(case.call("chunked"), case.call("triton"), leaves, tolerance=1e-10)


def exactness(case, exact):
    """The distances from float64 of torch's float32 and of the kernels', result by result."""
    weights = None
    found = {}
    for backend, dtype in (("chunked", torch.float64), ("chunked", torch.float32), ("triton", torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
        y, surprise, new = case.call(backend)(*leaves)
        outputs = [y, surprise, *new.layers]
        weights = weights or [torch.randn_like(x) for x in outputs]
        loss = sum((x * w.to(dtype)).sum() for x, w in zip(outputs, weights, strict=True))
        found[backend, dtype] = [x.double() for x in (*outputs, *torch.autograd.grad(loss, leaves))]
    return [
        (distance(true, plain), distance(true, ours))
        for true, plain, ours in zip(*found.values(), strict=True)
    ]


@pytest.mark.parametrize("kind", list(KINDS))
def test_float32_is_as_exact_as_torch(kind):
    norm, settings = KINDS[kind]
    case = Case(
        net=MLP(depth=1, norm=norm), rule=Rule(**settings), width=16, tokens=70, chunk=32, batch=1, heads=1, step=-3.0
    )  # fmt: skip
    for index, (plain, ours) in enumerate(exactness(case, case.leaves())):
        assert ours <= 2 * plain + 1e-6, f"result {index}"


def test_repeated_keys_do_not_cancel():
    """One key a whole chunk long at a full step: every entry below the system's diagonal is one."""
    case = Case(
        net=NETS["linear"], rule=RULES["delta"], width=16, tokens=64, chunk=64, batch=1, heads=1, step=20.0
    )
    leaves = case.leaves()
    leaves[1] = leaves[1].detach()[:, :1].expand_as(leaves[1]).contiguous()
    for index, (plain, ours) in enumerate(exactness(case, leaves)):
        assert ours <= 2 * plain + 1e-6, f"result {index}"


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize(("kind", "largest"), [("batch", 2.5e20), ("batch LN", 1e30), ("exact", 1e30)])
def test_the_leash_holds_as_chunked_does(kind, largest, monkeypatch):
    """A carried gradient beyond its reach is held at the same length, though its columns were shared out."""
    # A reach that is exceeded in most chunks, in float64, where both tiers agree to many digits.
    monkeypatch.setattr(torch, "finfo", lambda dtype: type("Short", (), {"eps": 3000.0, "max": largest}))
    norm, settings = KINDS[kind]
    case = Case(net=MLP(depth=1, norm=norm), rule=Rule(**settings), tokens=14, chunk=4, batch=1, heads=1, width=20, step=3.0,  # noqa: E501
                aligned=True)  # fmt: skip
    leaves = case.leaves()
    with torch.no_grad():
        leaves[1][:] = leaves[1][:, :1].clone()
    held = []
    hold = chunked.GradientClamp.apply

    def watch(self, g_state, came):
        before = g_state[0].clone()
        hold(self, g_state, came)
        held.append(not torch.equal(before, g_state[0]))

    monkeypatch.setattr(chunked.GradientClamp, "apply", watch)
    assert_same_function(case.call("chunked"), case.call("triton"), leaves, tolerance=1e-8)
    assert any(held)
    counts = []
    for backend in ("chunked", "triton"):
        reset_clamped()
        y, surprise, new = case.call(backend)(*leaves)
        torch.autograd.grad(y.sum() + surprise.sum() + new.layers[0].sum(), leaves, allow_unused=True)
        counts.append(clamped())
    assert counts == [1, 1]


@pytest.mark.parametrize(
    "settings", [(True, False, True, False, False), (False, True, True, True, True)], ids=["LN", "decayed"]
)
def test_the_compiler_sees_one_operator(settings):
    """torch's own checks of it, and a compiled function that calls it, whole."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64).mul_(0.3).requires_grad_()
    gates = [make(1, 8, 1).detach().abs().neg().requires_grad_() for _ in range(3)]
    leaves = [*[make(1, 8, 1, 4) for _ in range(3)], *gates, make(1, 2, 4, 4)]
    plan = fused_linear.Plan(4, 4, 4, 1, True, True, *settings, "ieee")
    totals = torch.tensor([8], dtype=torch.int32)

    def loss(q, *rest):
        y, surprise, end, *_ = fused_linear.linear_forward(1.5 * q, *rest, totals, True, *plan)
        return y.square().sum() + surprise.sum() + end.sin().sum()

    torch.library.opcheck(fused_linear.linear_forward, (*leaves, totals, True, *plan))
    true = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(true, found, strict=True))


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_divergence_raises_the_flag(backend):
    q, k, v = torch.randn(3, 2, 40, 1, 4)
    v[0] = 1e38  # stored in the first chunk, ten times over
    gates = Gates(*[torch.full((2, 40, 1), value) for value in (3.0, -0.1, 0.0)])
    state = start(NETS["linear"].init(1, 4), 2, chunk=16)
    y, state, _ = memorize(q, k, v, gates, state, net=NETS["linear"], chunk=16, backend=backend, check=False)
    assert state.diverged.tolist()[0]
    assert y[1, :16].isfinite().all()


def test_what_it_cannot_run_is_said():
    case = Case(net=MLP(depth=1, bias=True))
    with pytest.raises(ValueError, match="without bias"):
        case.call("triton")(*case.leaves())
    case = Case(net=NETS["linear"], rule=Rule(decay_first=True))
    with pytest.raises(ValueError, match="decay_first"):
        case.call("triton")(*case.leaves())
