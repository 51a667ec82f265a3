"""A memory written in place is the memory: token by token, rows anywhere in their chunks, some of them waiting.

The kernel runs under Triton's interpreter, in a process of its own, in float64 like the rest.
"""

import pytest
import torch
from cases import Case, pairwise

from remanence.layers import ShortConv, l2_normalize
from remanence.ops import MLP, NETS, RULES, Gates, Rule, current_weights, decode, memorize, start
from remanence.ops.rules import is_linear
from remanence.ops.triton import decode as decode_kernels
from remanence.runtime.state import where
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(4)

inside = pytest.mark.interpreted
TOKEN_EXACT = {
    "titans": Rule(anchor="token"),
    "delta": RULES["delta"],
    "gated_delta": RULES["gated_delta"],
    "gated_delta with momentum": Rule(decay_first=True, anchor="token"),
}


def walk(case, backend, steps):
    """Rows read 1, 4 and 8 tokens; then `steps` are decoded, of which each row sits out some."""
    case.batch, case.tokens = 3, 8 + steps
    q, k, v, *rest = (x.detach() for x in case.leaves())
    names = ["log_step", *["log_momentum"] * case.rule.momentum, *["log_keep"] * case.rule.forget]
    gates = Gates(**dict(zip(names, rest, strict=False)))
    weights, momentum = rest[len(names) :][: case.depth], rest[len(names) + case.depth :]
    keywords = {"net": case.net, "rule": case.rule, "chunk": case.chunk, "backend": "chunked"}
    widths = {"width": case.values or case.width, "keys": case.width}
    state = start(
        tuple(weights), 3, rule=case.rule, chunk=case.chunk, **widths, momentum=tuple(momentum) or None
    )

    def read(state, part):
        return memorize(
            q[:, part], k[:, part], v[:, part], gates.map(lambda gate: gate[:, part]), state, **keywords
        )

    for t in range(8):
        state = where([t < 1, t < 4, True], read(state, slice(t, t + 1))[1], state)
    untouched = state.clone()
    running = decode.InPlaceMemory(state, case.net, case.rule, backend)
    for t in range(8, 8 + steps):
        active = torch.rand(3) < 0.8
        answers, new, surprises = read(state, slice(t, t + 1))
        y, surprise = running.step(q[:, t], k[:, t], v[:, t], gates.map(lambda gate, t=t: gate[:, t]), active)
        assert_close(answers[active, 0], y[active], 1e-10, "answers")
        assert_close(surprises[active, 0], surprise[active], 1e-10, "surprise")
        if backend == "triton":
            assert not y[~active].any() and not surprise[~active].any()
        state = where(active.tolist(), new, state)
        assert_close(
            current_weights(state, net=case.net, rule=case.rule), running.current_weights(), 1e-10, "weights"
        )
        if t % 5 == 0:
            assert_close(state, running.state, 1e-10, "state")
    assert_close(state, running.state, 1e-10, "state")
    rows, weights = (
        torch.tensor([True, False, True]),
        tuple(torch.zeros_like(weight) for weight in running.weights),
    )
    running.copy_weights(weights, rows)
    for weight, held in zip(weights, running.weights, strict=True):
        assert_close(held[rows], weight[rows], 0.0)
        assert not weight[~rows].any()
    assert_close(untouched, decode.InPlaceMemory(untouched, case.net, case.rule, backend).state, 0.0)


@pytest.mark.parametrize(
    "s",
    pairwise(
        depth=[1, 2, 3],
        norm=[True, False],
        residual=[True, False],
        bias=[True, False],
        activation=["gelu", "silu"],
        momentum=[True, False],
        forget=["yes", "no", "first"],
        loss=["squared", "dot"],
        chunk=[4, 1, 5],
        extreme=["none", "clear", "no past", "no step"],
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_every_mlp(s):
    net = MLP(
        **{name: s[name] for name in ("depth", "norm", "residual", "bias", "activation")}, expansion=1.5
    )
    rule = Rule(
        momentum=s["momentum"], forget=s["forget"] != "no", decay_first=s["forget"] == "first", loss=s["loss"]
    )
    walk(
        Case(net=net, rule=rule, chunk=s["chunk"], extreme=s["extreme"], step=-1.0 if net.norm else -5.0),
        "plain",
        14,
    )


@pytest.mark.parametrize(
    "s",
    pairwise(residual=[True, False], bias=[True, False], momentum=[True, False], forget=["yes", "no", "first"],
             loss=["squared", "dot"], chunk=[4, 1, 5], extreme=["none", "clear", "no past", "no step"]),
    ids=lambda s: "-".join(map(str, s.values())),
)  # fmt: skip
def test_token_exact(s):
    net = MLP(depth=1, norm=False, residual=s["residual"], bias=s["bias"])
    forget = {"forget": s["forget"] != "no", "decay_first": s["forget"] == "first"}
    rule = Rule(momentum=s["momentum"], loss=s["loss"], anchor="token", **forget)
    walk(Case(net=net, rule=rule, chunk=s["chunk"], extreme=s["extreme"]), "plain", 14)


@pytest.mark.parametrize("widths", [(6, 3), (3, 6)], ids=str)
@pytest.mark.parametrize("name", ["gated_delta", "linear_attention"])
def test_values_of_another_width(name, widths):
    case = Case(net=NETS["linear"], rule=RULES[name], width=widths[0], values=widths[1])
    walk(case, "plain", 10)


def test_a_deep_net_of_chunks_of_one():
    walk(Case(rule=Rule(anchor="token"), chunk=1), "plain", 6)


@inside
@pytest.mark.parametrize(
    "s",
    pairwise(
        norm=[True, False],
        residual=[True, False],
        activation=["gelu", "silu"],
        momentum=[True, False],
        forget=[True, False],
        expansion=[1.5, 5.0],
        chunk=[4, 1, 3],
        block=[16, 64],
        extreme=["none", "clear", "no past", "no step"],
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_the_kernel(s, monkeypatch):
    monkeypatch.setattr(decode_kernels, "BLOCK", s["block"])
    net = MLP(norm=s["norm"], residual=s["residual"], activation=s["activation"], expansion=s["expansion"])
    rule = Rule(momentum=s["momentum"], forget=s["forget"])
    walk(
        Case(
            net=net,
            rule=rule,
            chunk=s["chunk"],
            extreme=s["extreme"],
            step=-1.0 if net.norm else -5.0,
            heads=1,
        ),
        "triton",
        6,
    )


@inside
def test_whole_tiles():
    walk(Case(net=MLP(expansion=2.0), width=16, chunk=16), "triton", 10)


@inside
@pytest.mark.parametrize(
    "s",
    pairwise(
        anchor=["token", "chunk"],
        forget=["first", "yes", "no"],
        momentum=[True, False],
        values=[None, "residual", 3, 21],
        loss=["squared", "dot"],
        chunk=[4, 1, 3],
        block=[16, 64],
        extreme=["none", "clear", "no past", "no step"],
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_the_kernel_of_a_matrix(s, monkeypatch):
    monkeypatch.setattr(decode_kernels, "BLOCK", s["block"])
    residual = s["values"] == "residual"
    net = MLP(depth=1, norm=False, residual=residual)
    forget = {"forget": s["forget"] != "no", "decay_first": s["forget"] == "first"}
    rule = Rule(momentum=s["momentum"], loss=s["loss"], anchor=s["anchor"], **forget)
    values = None if residual else s["values"]
    walk(
        Case(net=net, rule=rule, chunk=s["chunk"], extreme=s["extreme"], values=values, heads=1), "triton", 9
    )


@inside
@pytest.mark.parametrize(
    "s",
    pairwise(
        rule=list(TOKEN_EXACT),
        widths=[(5, 18), (18, 5), (16, 16)],
        extreme=["none", "clear", "no past", "no step"],
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_the_token_exact_rules_of_a_matrix(s, monkeypatch):
    """More columns than a block has, and whole tiles, among them; over more than one chunk's border."""
    monkeypatch.setattr(decode_kernels, "BLOCK", 16)
    (width, values), rule = s["widths"], TOKEN_EXACT[s["rule"]]
    walk(Case(net=NETS["linear"], rule=rule, width=width, values=values, extreme=s["extreme"]), "triton", 9)


@inside
@pytest.mark.parametrize(("kernel", "slack", "width"), [(4, 3, 5), (1, 0, 4), (3, 0, 16), (2, 15, 4)])
def test_the_convolutions(kernel, slack, width):
    """One kernel is the layers' three convolutions, SiLU and unit length."""
    convs = [ShortConv(2 * width, kernel, slack).double() for _ in range(3)]
    pasts = [torch.randn(2, conv.history, 2 * width, dtype=torch.float64) for conv in convs]
    kept, asked = [past.clone() for past in pasts], pasts[0].clone()
    for active in ([True, False], [True, True], [False, True]):
        rows, xs = torch.tensor(active), torch.randn(3, 2, 2 * width, dtype=torch.float64)
        weights = [conv.weight.detach() for conv in convs]
        ys = decode.convolve(xs, kept, weights, 2, rows)
        (alone,) = decode.convolve(xs[:1], [asked], weights[:1], 2, rows)
        assert_close(alone, ys[0], 0.0)
        for i, conv in enumerate(convs):
            y, past = conv(xs[i].unsqueeze(1), pasts[i])
            y = torch.nn.functional.silu(y[:, 0]).unflatten(-1, (2, width))
            pasts[i] = where(active, past, pasts[i])
            assert_close((y if i == 2 else l2_normalize(y)).detach(), ys[i], 1e-10)
            assert_close(pasts[i].detach(), kept[i], 1e-10)
        assert_close(asked, kept[0], 0.0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["plain", pytest.param("triton", marks=inside)])
def test_divergence_raises_the_flag(backend, depth):
    net = MLP(depth=depth, norm=False)
    state = start(net.init(1, 4), 2, chunk=4)
    running = decode.InPlaceMemory(state, net, Rule(), backend)
    q, k, v = torch.randn(3, 2, 1, 4)
    v[0] = 1e30
    gates = Gates(*[torch.full((2, 1), value) for value in (0.0, -0.1, 0.0)])
    for _ in range(9):
        y, _ = running.step(q, 0.1 * k, v, gates, torch.tensor([True, True]))
    assert running.state.diverged.tolist() == [True, False]
    assert y[1].isfinite().all()


@inside
def test_auto_takes_the_kernels():
    """A matrix by every rule, and two layers; what no kernel knows is refused by name and runs without."""
    linear = [rule for rule in RULES.values() if is_linear(rule)]
    assert len(linear) >= 7
    for net, rule in [(NETS["linear"], rule) for rule in linear] + [(MLP(), Rule())]:
        running = decode.InPlaceMemory(start(net.init(1, 4), 1, rule=rule), net, rule)
        assert running.step == running._step_fused
    net = MLP(depth=1)  # its LayerNorm needs all columns at once
    state = start(net.init(1, 4), 1)
    running = decode.InPlaceMemory(state, net, Rule())
    assert running.step == running._step_plain
    with pytest.raises(
        ValueError, match="backend: 'triton' cannot decode this memory: the kernels decode two layers"
    ):
        decode.InPlaceMemory(state, net, Rule(), "triton")
    wide = start(NETS["linear"].init(1, 4, values=129), 1, keys=4)
    running = decode.InPlaceMemory(wide, NETS["linear"], Rule())
    assert running.step == running._step_plain


def test_a_net_without_a_closed_form_is_refused():
    class Own:
        init, apply = MLP().init, MLP().apply

    with pytest.raises(ValueError, match="net: expected a memory that can be updated in place, got Own"):
        decode.InPlaceMemory(start(MLP().init(1, 4), 1), Own(), Rule())
