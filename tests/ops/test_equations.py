"""Law 2 and law 5: the operator against plain loops that share no code with it."""

import pytest
import torch
import torch.nn.functional as F
from cases import Case

from remanence.ops import MLP, NETS, RULES, Gates, Rule, memorize, start
from remanence.testing import assert_close

BACKENDS = ["reference", "chunked"]


def _run(case, leaves, backend):
    return case.call(backend)(*leaves)[0].detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
def test_chunk_one_is_equations_12_to_15(backend, norm):
    """Two layers, momentum, forgetting: loops over rows, heads and tokens, gradient of the loss as printed."""
    case = Case(net=MLP(expansion=1.5, norm=norm), chunk=1, tokens=9)
    q, k, v, log_step, log_momentum, log_keep, W1, W2, S1, S2 = (x.detach() for x in case.leaves())

    def M(w1, w2, x):
        out = F.gelu(x @ w1) @ w2
        if norm:
            out = (out - out.mean()) / (out.var(unbiased=False) + 1e-5).sqrt()
        return x + out

    expected = torch.zeros_like(q)
    for row in range(2):
        for head in range(2):
            w1, w2, s1, s2 = W1[head], W2[head], S1[row, head], S2[row, head]
            for t in range(case.tokens):
                theta, eta, alpha = (
                    log_step[row, t, head].exp(),
                    log_momentum[row, t, head].exp(),
                    1 - log_keep[row, t, head].exp(),
                )
                at = [w1.clone().requires_grad_(), w2.clone().requires_grad_()]
                loss = 0.5 * (M(*at, k[row, t, head]) - v[row, t, head]).square().sum()  # eq. 12
                u1, u2 = torch.autograd.grad(loss, at)
                s1, s2 = eta * s1 - theta * u1, eta * s2 - theta * u2  # eq. 14
                w1, w2 = (1 - alpha) * w1 + s1, (1 - alpha) * w2 + s2  # eq. 13
                expected[row, t, head] = M(w1, w2, q[row, t, head])  # eq. 15
    assert_close(_run(case, case.leaves(), backend), expected, 1e-12)


def _linear(rule, chunk, tokens=20):
    case = Case(net=NETS["linear"], rule=rule, chunk=chunk, tokens=tokens, batch=1, heads=1)
    leaves = [x.detach() for x in case.leaves()]
    return case, leaves, [x[0, :, 0] for x in leaves[:3]]


CHUNKS = [("chunk", 1), ("token", 1), ("token", 16), ("token", 64)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("anchor", "chunk"), CHUNKS)
def test_delta_net(backend, anchor, chunk):
    case, leaves, (q, k, v) = _linear(Rule(momentum=False, forget=False, anchor=anchor), chunk)
    beta, W = leaves[3][0, :, 0].exp(), leaves[4][0]
    answers = []
    for t in range(case.tokens):
        W = W - beta[t] * torch.outer(k[t], k[t] @ W) + beta[t] * torch.outer(k[t], v[t])
        answers.append(q[t] @ W)
    assert_close(_run(case, leaves, backend)[0, :, 0], torch.stack(answers), 1e-12)


def _gated_delta_net(q, k, v, beta, gamma, W):
    answers = []
    for t in range(q.shape[0]):
        W = gamma[t] * (W - beta[t] * torch.outer(k[t], k[t] @ W)) + beta[t] * torch.outer(k[t], v[t])
        answers.append(q[t] @ W)
    return torch.stack(answers)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("anchor", "chunk"), CHUNKS)
def test_gated_delta_net_by_decay_first(backend, anchor, chunk):
    case, leaves, (q, k, v) = _linear(Rule(momentum=False, decay_first=True, anchor=anchor), chunk)
    beta, gamma = leaves[3][0, :, 0].exp(), leaves[4][0, :, 0].exp()
    expected = _gated_delta_net(q, k, v, beta, gamma, leaves[5][0])
    assert_close(_run(case, leaves, backend)[0, :, 0], expected, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_net_by_scaled_step_and_value(backend):
    """The same without the rule entry: theta = gamma beta, value v / gamma."""
    case, leaves, (q, k, v) = _linear(Rule(momentum=False, anchor="token"), 16)
    beta, gamma = leaves[3].exp(), leaves[4].exp()
    expected = _gated_delta_net(q, k, v, beta[0, :, 0], gamma[0, :, 0], leaves[5][0])
    leaves[2], leaves[3] = leaves[2] / gamma.unsqueeze(-1), (gamma * beta).log()
    assert_close(_run(case, leaves, backend)[0, :, 0], expected, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 5])
def test_ttt(backend, chunk):
    """TTT's mini-batch: every gradient at the weights of the mini-batch's start, added up inside it."""
    net = MLP(expansion=2.0)
    case = Case(net=net, rule=RULES["ttt"], chunk=chunk, tokens=12, batch=1, heads=1)
    q, k, v, log_step, *W = (x.detach() for x in case.leaves())
    now = [w[0] for w in W]
    answers = []
    for t in range(case.tokens):
        if t % chunk == 0:
            anchor = [w.clone().requires_grad_() for w in now]
        out = F.gelu(k[0, t, 0] @ anchor[0]) @ anchor[1]
        loss = 0.5 * (k[0, t, 0] + F.layer_norm(out, out.shape) - v[0, t, 0]).square().sum()
        change = torch.autograd.grad(loss, anchor, retain_graph=True)
        now = [w - log_step[0, t, 0].exp() * u for w, u in zip(now, change, strict=True)]
        out = F.gelu(q[0, t, 0] @ now[0]) @ now[1]
        answers.append(q[0, t, 0] + F.layer_norm(out, out.shape))
    assert_close(_run(case, case.leaves(), backend)[0, :, 0], torch.stack(answers), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_linear_attention(backend, chunk):
    """The inner loss -<M(k), v> ignores what is stored, so every chunk size is softmax-free attention exactly."""
    case, leaves, (q, k, v) = _linear(RULES["linear_attention"], chunk)
    leaves[3] = torch.zeros_like(leaves[3])
    leaves[4] = torch.zeros_like(leaves[4])
    expected = (q @ k.mT).tril() @ v
    assert_close(_run(case, leaves, backend)[0, :, 0], expected, 1e-12)


def test_a_stored_pair_is_recalled():
    """What the thing is for: one key written with step 1 into an empty matrix answers with its value."""
    k = F.normalize(torch.randn(1, 1, 1, 8), dim=-1)
    v = torch.randn(1, 1, 1, 8)
    rule = RULES["delta"]
    state = start((torch.zeros(1, 8, 8),), 1, rule=rule)
    y, _, surprise = memorize(k, k, v, Gates(torch.zeros(1, 1, 1)), state, net=NETS["linear"], rule=rule)
    assert_close(y, v, 1e-6)
    assert_close(surprise, 0.5 * v.square().sum(-1), 1e-6)
