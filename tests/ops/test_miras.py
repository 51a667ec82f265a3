"""Omega and the rules of MIRAS, against loops that share no code with the package; and which of them contract."""

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch.func import grad, jacrev

from remanence.ops import MLP, NETS, RULES, Gates, LinearRule, RuleState
from remanence.ops.miras import Descent, Huber, Memora, PowerLoss
from remanence.ops.omega import Omega
from remanence.testing import assert_close, assert_same_function

MATRIX = NETS["linear"]


def by_hand(q, k, v, log_step, log_keep, W, step):
    """One head of a matrix memory as a loop. ``W, carried = step(W, carried, k, v, theta, gamma)``."""
    answers, carried = [], None
    for t in range(len(k)):
        W, carried = step(W, carried, k[t], v[t], log_step[t].exp(), log_keep[t].exp())
        answers.append(q[t] @ W)
    return torch.stack(answers), W


def compare(rule, update, backend, **fields):
    """Check a rule against a loop over several chunks, in outputs, end state and gradients."""
    here = Case(net=MATRIX, rule=rule, chunk=5, tokens=15, batch=1, heads=1, **fields)

    def own(*leaves):
        y, _, state = here.call(backend)(*leaves)
        return y[0, :, 0], state.weights[0][0, 0]

    def loop(q, k, v, log_step, log_keep, weight):
        return by_hand(*(x[0, :, 0] for x in (q, k, v, log_step, log_keep)), weight[0], update)

    assert_same_function(own, loop, here.leaves(), 1e-11)


BACKENDS = pytest.mark.parametrize("backend", ["reference", "chunked"])


@BACKENDS
@pytest.mark.parametrize("average", [True, False])
def test_omega_is_the_gradient_of_a_sliding_window(backend, average):
    def step(W, seen, k, v, theta, gamma):
        seen = [*(seen or []), (k, v)][-3:]
        slopes = [torch.outer(key, key @ W - value) for key, value in seen]
        return gamma * W - theta * sum(slopes) / (3 if average else 1), seen

    compare(Omega(window=3, average=average), step, backend)


@BACKENDS
@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_yaad_limits_the_error(backend, delta):
    def step(W, _, k, v, theta, gamma):
        error = k @ W - v
        error = error * torch.clamp(delta / error.norm(), max=1.0)
        return gamma * W - theta * torch.outer(k, error), None

    compare(Descent(loss=Huber(delta=delta)), step, backend)


@BACKENDS
def test_l_p_weights_the_error_by_its_power(backend):
    def step(W, _, k, v, theta, gamma):
        error = k @ W - v
        return gamma * W - theta * torch.outer(k, error.sign() * error.abs() ** 2), None

    compare(RULES["l_p"], step, backend, step=-3.0)


@BACKENDS
def test_memora_stays_on_the_simplex(backend):
    def step(W, started, k, v, theta, gamma):
        logs = W.log() if started else torch.zeros_like(W)
        W = 2.0 * torch.softmax(gamma * logs - theta * torch.outer(k, k @ W - v), 0)
        return W, True

    compare(Memora(scale=2.0), step, backend)
    here = Case(net=MATRIX, rule=Memora(scale=2.0), chunk=5, tokens=15)
    weights = here.call(backend)(*here.leaves())[2].weights[0].detach()
    assert (weights > 0).all()
    assert_close(weights.sum(-2), torch.full_like(weights[..., 0, :], 2.0), 1e-12)


@pytest.mark.parametrize(
    "rule", [Omega(window=1), Descent(loss=Huber(delta=1e9)), Descent(loss=PowerLoss(p=2.0))], ids=str
)
def test_special_cases_are_the_paper_without_momentum(rule):
    plain = Case(net=MATRIX, rule=LinearRule(momentum=False, anchor="token"), chunk=4)
    other = Case(net=MATRIX, rule=rule, chunk=4)
    other.leaves()  # sets its depth
    outputs = lambda case: lambda *leaves: case.call("chunked")(*leaves)[0]
    assert_same_function(outputs(plain), outputs(other), plain.leaves(), 1e-12)


@pytest.mark.parametrize("name", ["omega", "yaad", "l_p"])
def test_deep_nets(name):
    here = Case(net=MLP(expansion=1.5), rule=RULES[name], chunk=3, tokens=7, step=-3.0)
    assert_same_function(here.call("reference"), here.call("chunked"), here.leaves(), 1e-10)


def test_the_gradient_of_huber_is_finite_without_an_error():
    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(grad(lambda y: Huber()(y, x))(x), x)
    assert grad(lambda y: Huber(delta=0.5)(y, x))(x + 1e6).norm() == pytest.approx(0.5)


def test_an_outlier_disturbs_yaad_less():
    """A value 1,000 times as long as the others, at a key that resembles that of a stored pair."""
    k = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1]], dtype=torch.float64), dim=-1)
    v = torch.tensor([[0.5, 0.5], [1000.0, 0.0]], dtype=torch.float64)
    found = {}
    for name in ("yaad", "gated_delta"):
        W = torch.zeros(2, 2, dtype=torch.float64)
        gates = Gates(torch.zeros(()).double(), None, torch.zeros(()).double())
        for key, value in zip(k, v, strict=True):
            u = grad(lambda W, key=key, value=value, name=name: RULES[name].loss_function(key @ W, value))(W)
            (W,) = RULES[name].update(RuleState((W,)), (u,), gates).weights
        found[name] = float((k[0] @ W - v[0]).norm())
    assert found["yaad"] < 1.1 < 900 < found["gated_delta"]


def window_gain(rule, keys, step=1.0, keep=1.0):
    """The largest singular value of an update as a map of the weights, for given keys of the window."""
    values, state = torch.zeros(len(keys), 2).double(), torch.zeros(3, 2).double()
    gates = Gates(torch.tensor(step).double().log(), None, torch.tensor(keep).double().log())

    def update(W):
        u = grad(lambda W: rule.objective(W.sum(), lambda k: k @ W, (keys, values)))(W)
        return rule.update(RuleState((W,), (keys, values)), (u,), gates).weights[0]

    return float(torch.linalg.matrix_norm(jacrev(update)(state).reshape(6, 6), ord=2))


def test_omega_contracts_with_the_mean_of_a_window_and_not_with_its_sum():
    """Keys as different and as equal as possible, and between; steps and gates at their ends."""
    rows = [torch.eye(4, 3).double(), torch.ones(4, 3).double(), torch.randn(4, 3).double()]
    for keys in [F.normalize(x, dim=-1) for x in rows]:
        for step in (0.0, 0.5, 1.0):
            for keep in (0.0, 0.5, 1.0):
                assert window_gain(Omega(), keys, step, keep) <= 1 + 1e-12
    equal = F.normalize(torch.ones(4, 3).double(), dim=-1)
    assert window_gain(Omega(average=False), equal) == pytest.approx(3.0)  # 1 - 4


def test_l_q_retention_is_a_counterexample():
    """Moneta's W = A / |A|_q^(q-2) with q = 4: forgetting half of A makes W twice as large."""
    A = torch.randn(3, 2, dtype=torch.float64)
    weights = lambda A: A / A.abs().pow(4).sum().pow(1 / 4) ** 2
    assert_close(weights(0.5 * A), 2 * weights(A), 1e-12)


@pytest.mark.parametrize(("kind", "fields"), [(Omega, {"window": 0}), (Memora, {"scale": 0.0})])
def test_wrong_fields(kind, fields):
    with pytest.raises(ValueError, match=rf"{next(iter(fields))}: expected"):
        kind(**fields)
