"""Random calls of the operator, small and in float64, as leaves that want gradients."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from remanence.ops import MLP, Gates, Rule, memorize, start
from remanence.ops.rules import is_linear


@dataclass
class Case:
    """One call: shapes, net, rule, chunk; `extreme` forces a share `rate` of the gates to alpha = 1, eta = 0 or theta =
    0.
    """

    net: object = field(default_factory=MLP)
    rule: Rule = field(default_factory=Rule)
    chunk: int = 4
    tokens: int = 11
    batch: int = 2
    heads: int = 2
    width: int = 4
    values: int | None = None
    extreme: str = "none"
    step: float = -1.0
    rate: float = 0.3
    offsets: list[int] | None = None
    aligned: bool = False
    dtype: torch.dtype = torch.float64

    def leaves(self, seed: int = 0) -> list[torch.Tensor]:
        """q, k, v, log gates, initial weights, initial momentum: whatever this case has."""
        torch.manual_seed(seed)
        shape = (self.batch, self.tokens, self.heads)
        rows = self.batch if self.offsets is None else len(self.offsets) - 1
        wide = {} if self.values is None else {"values": self.values}
        q, k, v = (
            torch.randn(*shape, width, dtype=self.dtype)
            for width in (self.width, self.width, self.values or self.width)
        )
        k = F.normalize(k, dim=-1)
        log_step = F.logsigmoid(torch.randn(shape, dtype=self.dtype) + self.step)
        log_momentum = F.logsigmoid(torch.randn(shape, dtype=self.dtype))
        of_keep = (*shape, self.width) if self.rule.forget_channels else shape
        log_keep = F.logsigmoid(torch.randn(of_keep, dtype=self.dtype) + 2)
        some = torch.rand(shape) < self.rate
        if self.extreme == "clear":
            log_keep = log_keep.masked_fill(some.view(*shape, *[1] * (log_keep.dim() - 3)), -torch.inf)
        elif self.extreme == "no past":
            log_momentum = log_momentum.masked_fill(some, -torch.inf)
        elif self.extreme == "no step":
            log_step = log_step.masked_fill(some, -torch.inf)
        gates = [log_step, *[log_momentum] * self.rule.momentum, *[log_keep] * self.rule.forget]
        weights = [weight.to(self.dtype) for weight in self.net.init(self.heads, self.width, **wide)]
        momentum = (
            [0.1 * torch.randn(rows, *weight.shape, dtype=self.dtype) for weight in weights]
            if self.rule.momentum and is_linear(self.rule)
            else []
        )
        self.depth = len(weights)
        return [x.detach().requires_grad_() for x in (q, k, v, *gates, *weights, *momentum)]

    def call(self, backend: str):
        """The operator as a function of those leaves."""

        def run(q, k, v, log_step, *rest):
            rest = list(rest)
            log_momentum = rest.pop(0) if self.rule.momentum else None
            log_keep = rest.pop(0) if self.rule.forget else None
            weights, momentum = tuple(rest[: self.depth]), tuple(rest[self.depth :])
            rows = self.batch if self.offsets is None else len(self.offsets) - 1
            width, keys = self.values or self.width, self.width
            state = start(
                weights,
                rows,
                rule=self.rule,
                chunk=self.chunk,
                width=width,
                keys=keys,
                momentum=momentum or None,
            )
            gates = Gates(log_step, log_momentum, log_keep)
            y, new, surprise = memorize(
                q, k, v, gates, state, net=self.net, rule=self.rule, chunk=self.chunk, offsets=self.offsets, backend=backend,  # noqa: E501
                aligned=self.aligned,
            )  # fmt: skip
            return y, surprise, new

        return run


def pairwise(**axes):
    """Few settings in which every two values of every two axes meet at least once (greedy, deterministic)."""
    names = list(axes)
    missing = {
        (i, a, j, b)
        for i in range(len(names))
        for j in range(i + 1, len(names))
        for a in range(len(axes[names[i]]))
        for b in range(len(axes[names[j]]))
    }
    rows = []
    while missing:
        i, a, j, b = min(missing)
        row = {i: a, j: b}
        for other in range(len(names)):
            if other not in row:
                row[other] = max(
                    range(len(axes[names[other]])),
                    key=lambda value, other=other, row=row: sum(
                        (min(other, x), value if other < x else y, max(other, x), y if other < x else value)
                        in missing
                        for x, y in row.items()
                    ),
                )
        missing -= {(x, row[x], y, row[y]) for x in row for y in row if x < y}
        rows.append({name: axes[name][row[index]] for index, name in enumerate(names)})
    return rows
