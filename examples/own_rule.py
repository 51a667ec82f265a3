"""A rule of your own, in one class and one registration: Adagrad as the optimizer of a memory.

The second moments of the gradients are kept for each row of the weights, beside the weights. The rule then has a
reference, streams, trains, decodes and is saved in memory files like any other: ``preset("tiny", "lmm", memory=...)``.
"""

import tempfile
from pathlib import Path

import torch
from torch.func import grad

from remanence import NETS, RULES, Gates, Model, NeuralMemory, Rule, Session, memorize, preset, start
from remanence.ops import RuleState
from remanence.testing import assert_causal, assert_split


class Adagrad(Rule):
    """W <- keep W - step u / sqrt(n), where n is the sum of u^2 so far, averaged over each row."""

    forget = True  # takes a forget gate beside the step size

    def init_state(self, weights):
        return tuple(torch.full_like(weight[..., :1], 1e-4) for weight in weights)

    def update(self, state, gradients, gates):
        step, keep = gates.log_step.exp(), gates.log_keep.exp()
        sums = [n + u.square().mean(-1, keepdim=True) for n, u in zip(state.buffers, gradients, strict=True)]
        weights = zip(state.weights, gradients, sums, strict=True)
        return RuleState(tuple(keep * W - step * u * n.rsqrt() for W, u, n in weights), tuple(sums))


RULES["adagrad"] = Adagrad()


def by_hand(q, k, v, gates, W, chunk):
    """The same for one head of a matrix memory, as a plain loop."""
    n, anchor, answers = torch.full_like(W[:, :1], 1e-4), W, []
    for t in range(len(k)):
        anchor = W if t % chunk == 0 else anchor
        u = grad(lambda A, t=t: 0.5 * (k[t] @ A - v[t]).square().sum())(anchor)
        n = n + u.square().mean(-1, keepdim=True)
        W = gates.log_keep[t].exp() * W - gates.log_step[t].exp() * u / n.sqrt()
        answers.append(q[t] @ W)
    return torch.stack(answers)


if __name__ == "__main__":
    torch.manual_seed(0)
    # The operator: the reference, the path that layers use, and the loop above.
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 30, 1, 8, dtype=torch.float64), dim=-1)
    logs = torch.nn.functional.logsigmoid(torch.randn(2, 1, 30, 1, dtype=torch.float64))
    gates, weights = Gates(logs[0], None, logs[1]), (torch.randn(1, 8, 8, dtype=torch.float64),)
    first = (q[0, :, 0], k[0, :, 0], v[0, :, 0], gates.map(lambda gate: gate[0, :, 0]), weights[0][0])
    expected = by_hand(*first, 8)
    for backend in ("reference", "chunked"):
        state = start(weights, rows=1, rule=RULES["adagrad"], chunk=8)
        options = {"net": NETS["linear"], "rule": RULES["adagrad"], "chunk": 8, "backend": backend}
        y, state, _ = memorize(q, k, v, gates, state, **options)
        print(f"{backend}: differs from the loop by {(y[0, :, 0] - expected).abs().max():.1e}")

    # The layer, with its laws.
    layer = NeuralMemory(dim=16, heads=2, net="titans", rule="adagrad", chunk=8).double()
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    assert_causal(layer, x)
    assert_split(layer, x, [3, 16, 1])
    print("the layer is causal, and one call equals any split")

    # A model: read, save the memory, load it, go on.
    config = preset("tiny", "lmm", memory={"net": "titans", "rule": "adagrad", "chunk": 16, "expansion": 1.0})
    model = Model(config).eval()
    session = Session(model)
    session.read("Something to remember. " * 4)
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "notes.mem")
        again = Session(model)
        again.load(Path(folder) / "notes.mem")
    texts = [each.generate("And then", max_tokens=4, temperature=0.0) for each in (session, again)]
    print("the memory file continues as the session does:", texts[0] == texts[1])
