"""Law 6: the default net stays finite on what would break it; a net that does break says so."""

import pytest
import torch
import torch.nn.functional as F

from remanence.ops import MLP, NETS, Gates, Rule, clamped, memorize, recall, reset_clamped, start

pytestmark = pytest.mark.sample(4)

TOKENS = 16_384


def adversary(kind, shape, dtype=torch.bfloat16, deep=False):
    """Queries, keys and values meant to hurt. Keys have unit length, as the operator asks; queries and values
    have any.
    """
    x = torch.randn(3, *shape)
    if kind == "constant":
        x = torch.ones_like(x)
    elif kind == "huge":
        x = x * (1e3 if deep else 1e4)  # a net of four layers meets 1e4 to the fourth
    elif kind == "repeated":
        x[1] = x[1, :, :1]
    elif kind == "zero":
        x = torch.zeros_like(x)
    x[1] = F.normalize(x[1], dim=-1)
    return [part.to(dtype).requires_grad_() for part in x]


@pytest.mark.parametrize("kind", ["random", "constant", "huge", "repeated", "zero"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_default_net_is_finite_in_bf16_over_16k_tokens(depth, kind):
    net, rule, chunk = MLP(depth=depth), Rule(), 64
    shape = (1, TOKENS, 2, 8)
    q, k, v = adversary(kind, shape, deep=depth == 4)
    gates = Gates(
        *[F.logsigmoid(torch.randn(shape[:3]) + bias).requires_grad_() for bias in (-2.0, 1.0, 5.0)]
    )
    weights = tuple(weight.requires_grad_() for weight in net.init(2, 8))
    y, state, surprise = memorize(
        q, k, v, gates, start(weights, 1, chunk=chunk), net=net, rule=rule, chunk=chunk
    )
    (y.float() * torch.randn(shape)).mean().backward()
    assert y.dtype == torch.bfloat16
    assert surprise.dtype == torch.float32
    for name, tensor in {
        "y": y,
        "surprise": surprise,
        **{f"w{i}": w for i, w in enumerate(state.weights)},
    }.items():
        assert tensor.isfinite().all(), name
    assert not state.diverged.any()
    for name, leaf in {
        "q": q,
        "k": k,
        "v": v,
        **gates._asdict(),
        **{f"w{i}": w for i, w in enumerate(weights)},
    }.items():
        assert leaf.grad.isfinite().all(), f"gradient of {name}"


def _equal_keys(net, rows, tokens, chunk, backend, calm_row=None):
    """The same key over and over with a full step: a chunk's step is then multiplied by its length."""
    k = F.normalize(torch.ones(rows, tokens, 1, 4), dim=-1)
    v = 3 * torch.randn(rows, tokens, 1, 4)
    log_step = torch.zeros(rows, tokens, 1)
    if calm_row is not None:
        log_step[calm_row] = -20.0
    gates = Gates(log_step, torch.full_like(log_step, -0.1), torch.zeros_like(log_step))
    return memorize(
        k, k, v, gates, start(net.init(1, 4), rows, chunk=chunk), net=net, chunk=chunk, backend=backend
    )


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_net_that_diverges_raises_the_flag(backend):
    net, chunk = MLP(depth=1, norm=False), 16
    y, state, _ = _equal_keys(net, 2, 640, chunk, backend, calm_row=1)
    assert state.diverged.tolist() == [True, False]
    assert not y[0].isfinite().all()
    assert y[1].isfinite().all(), "one row's divergence must not reach another"
    one, calm = torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1)
    calm = Gates(calm - 20.0, calm, calm)
    _, state, _ = memorize(one, one, one, calm, state, net=net, chunk=chunk, backend=backend)
    assert state.diverged.tolist() == [True, False], "the flag stays up"


def test_the_plain_residual_net_runs_away_where_the_default_does_not():
    """The documented fact behind the default: without LayerNorm, equal keys drive a two-layer net out of float
    range.
    """
    _, state, _ = _equal_keys(NETS["residual"], 64, 640, 16, "chunked")
    assert state.diverged.sum() > 10, (
        "most weights overflow, a few get stuck in gelu's flat part, far too large"
    )
    _, state, _ = _equal_keys(NETS["titans"], 64, 640, 16, "chunked")
    assert not state.diverged.any()


def test_small_gates_do_not_underflow_into_nan():
    """alpha = 0.9 over 64 tokens: a quotient of products would be 0 / 0."""
    net, chunk, tokens = MLP(depth=2), 64, 128
    q, k, v = (torch.randn(1, tokens, 1, 8) for _ in range(3))
    gates = Gates(*[torch.full((1, tokens, 1), value).requires_grad_() for value in (-2.0, -5.0, -2.3026)])
    y, _, _ = memorize(
        q, F.normalize(k, dim=-1), v, gates, start(net.init(1, 8), 1, chunk=chunk), net=net, chunk=chunk
    )
    reset_clamped()
    y.sum().backward()
    assert y.isfinite().all()
    assert all(gate.grad.isfinite().all() for gate in gates)
    assert clamped() == 0


@pytest.mark.parametrize(
    ("dtype", "scale", "chunks"),
    [(torch.float64, 1.0, 12), (torch.float32, 1.0, 12), (torch.float32, 1e8, 2)],
)
def test_the_leash_does_not_touch_a_gradient_that_still_means_something(dtype, scale, chunks):
    """Equal keys and a full step multiply a matrix memory's gradient by -3 in every chunk of 4: 3^12 is exact, and must
    stay.
    """
    net, rule, chunk = NETS["linear"], Rule(momentum=False, forget=False), 4
    tokens = chunk * chunks
    k = F.normalize(torch.ones(1, tokens, 1, 4, dtype=dtype), dim=-1)
    q, v = scale * k, torch.randn(1, tokens, 1, 4, dtype=dtype)
    upstream = torch.randn(1, 4, dtype=dtype)
    grads = []
    for backend in ("reference", "chunked"):
        weights = (torch.zeros(1, 4, 4, dtype=dtype, requires_grad=True),)
        state = start(weights, 1, rule=rule, chunk=chunk)
        y, _, _ = memorize(
            q,
            k,
            v,
            Gates(torch.zeros(1, tokens, 1, dtype=dtype)),
            state,
            net=net,
            rule=rule,
            chunk=chunk,
            backend=backend,
        )
        grads.append(torch.autograd.grad((y[:, -1] * upstream).sum(), weights)[0])
    assert grads[0].abs().max() > scale * 3 ** (chunks - 1) * upstream.abs().max() / 8, (
        "the gradient was amplified"
    )
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=0.0)


class Own:
    """A net that no closed form knows."""

    def init(self, heads, width):
        return NETS["linear"].init(heads, width)

    def apply(self, weights, x):
        return NETS["linear"].apply(weights, x)


@pytest.mark.parametrize("net", [NETS["linear"], Own()], ids=["closed form", "own"])
def test_a_held_gradient_is_counted_once_for_each_row_and_head_and_call(net):
    """Equal keys double a matrix memory's gradient in every chunk, forty times over."""
    rule, chunk, heads = Rule(momentum=False, forget=False), 16, 2
    k = F.normalize(torch.ones(3, 640, heads, 4), dim=-1)
    v = torch.randn(3, 640, heads, 4)
    log_step = torch.full((3, 640, heads), -1.0)
    log_step[0] = -20.0  # a calm row
    reset_clamped()
    for calls in (1, 2):
        weights = tuple(weight.requires_grad_() for weight in net.init(heads, 4))
        state = start(weights, 3, rule=rule, chunk=chunk)
        y, _, _ = memorize(
            k, k, v, Gates(log_step), state, net=net, rule=rule, chunk=chunk, backend="chunked"
        )
        assert clamped() == 4 * (calls - 1), "reading counts nothing"
        y[:, -1].sum().backward()
        assert clamped() == 4 * calls
    reset_clamped()
    assert clamped() == 0


def test_recall_answers_like_memorize_at_any_scale():
    """Weights so large that LayerNorm's squares overflow float32."""
    net = MLP(depth=2)
    for scale in (1.0, 1e10, 1e14):
        state = start(tuple(scale * weight for weight in net.init(1, 8)), 1)
        q = torch.randn(1, 1, 1, 8)
        still = Gates(*[torch.full((1, 1, 1), value) for value in (-torch.inf, -torch.inf, 0.0)])
        for backend in ("chunked", "reference"):
            y, _, _ = memorize(q, q, q, still, state, net=net, backend=backend)
            torch.testing.assert_close(recall(q, state, net=net), y, atol=1e-4, rtol=1e-4)
