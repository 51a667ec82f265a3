"""Write a memory of your own: any net with init and apply, any inner loss, checked against the reference."""

import torch

from remanence import Gates, Rule, memorize, start


class Gated:
    """x + (silu(x A) * (x B)) C: a small SwiGLU as memory."""

    def init(self, heads, width, generator=None):
        return tuple(torch.randn(heads, width, width, generator=generator) / width**0.5 for _ in range(3))

    def apply(self, weights, x):
        a, b, c = weights
        return x + (torch.nn.functional.silu(x @ a) * (x @ b)) @ c


def huber(prediction, value):
    return torch.nn.functional.huber_loss(prediction, value, reduction="none").sum(-1)


torch.manual_seed(0)
net, rule = Gated(), Rule(loss=huber)
q, k, v = (torch.randn(2, 40, 4, 8, dtype=torch.float64) for _ in range(3))
k = torch.nn.functional.normalize(k, dim=-1)
biases = [torch.full((2, 40, 4), bias, dtype=torch.float64) for bias in (-3.0, 0.0, 5.0)]
gates = Gates(*[torch.nn.functional.logsigmoid(bias) for bias in biases])
weights = tuple(weight.double() for weight in net.init(4, 8))

answers = {}
for backend in ("reference", "chunked"):
    state = start(weights, rows=2, rule=rule, chunk=8)
    options = {"net": net, "rule": rule, "chunk": 8, "backend": backend}
    answers[backend], state, surprise = memorize(q, k, v, gates, state, **options)
difference = (answers["reference"] - answers["chunked"]).abs().max()
print(f"mean surprise {surprise.mean():.3f}; tiers differ by {difference:.1e}")
