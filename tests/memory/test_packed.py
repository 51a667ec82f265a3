"""The state of a document packed beside others is the state of the document alone, in float32 too."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from remanence import MLP, Gates, NeuralMemory, Rule, memorize, start
from remanence.ops import RULES
from remanence.runtime.state import parts


class OwnNet:
    """A net without a closed form, which answers a key of zero with more than a float can hold."""

    def init(self, heads, width, generator=None):
        return (torch.ones(heads, width, width),)

    def apply(self, weights, x):
        return x @ weights[0] + torch.where(x.abs().sum(-1, keepdim=True) > 0, 0.0, torch.inf)


def overflows_at_zero(width=4):
    """Weights that answer the first unit vector with zero, and a zero vector, as padding is, with infinity."""
    net = MLP(depth=4, norm=False, bias=True)
    first, *rest = weights = tuple(weight.zero_() for weight in net.init(1, width))
    first[:, 0], first[:, -1] = -1e11, 1e11
    for weight in rest:
        weight[:, :-1] = 1e11
    return net, weights


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("lengths", [[8, 16], [4, 0, 12], [12, 4, 4]])
def test_padding_never_flags_or_changes_a_memory(lengths, own, backend):
    rule, chunk = Rule(), 4
    net, weights = (OwnNet(), OwnNet().init(1, 4)) if own else overflows_at_zero()
    tokens, borders = sum(lengths), [0, *accumulate(lengths)]
    k = torch.zeros(1, tokens, 1, 4)
    k[..., 0] = 1
    gates = Gates(*[torch.full((1, tokens, 1), log) for log in (-torch.inf, -1.0, 0.0)])
    read = lambda k, gates, rows, **more: memorize(
        k, k, k, gates, start(weights, rows, rule=rule, chunk=chunk, width=4),
        net=net, rule=rule, chunk=chunk, backend=backend, **more,
    )[1]  # fmt: skip
    packed = read(k, gates, len(lengths), offsets=borders)
    assert not packed.diverged.any()
    for row, (a, b) in enumerate(pairwise(borders)):
        alone = read(k[:, a:b], gates.map(lambda gate, a=a, b=b: gate[:, a:b]), 1)
        assert all(map(torch.equal, alone.tensors(), packed.rows(row).tensors()))


def settings(count):
    random.seed(7)
    while count:
        net = random.choice(["deep", "titans", "residual", "linear"])
        fields = {
            "dim": 16, "net": net, "rule": random.choice(list(RULES)), "heads": random.choice([1, 2]),
            "chunk": random.choice([1, 2, 3, 4, 8, 16]), "conv": random.choice([0, 2, 4]),
            "momentum_bias": random.choice([-5.0, 0.0, 3.0]), "forget_bias": random.choice([-8.0, -3.0, 0.0]),
            "step_bias": random.choice([-5.0, -2.0, 0.0]), "threshold": random.choice([0.0, 0.0, 0.05]),
        }  # fmt: skip
        if net in ("titans", "residual"):
            fields |= {"depth": random.choice([1, 2, 3]), "bias": random.choice([False, True])}
        if fields["conv"] and random.random() < 0.3:
            fields["induction"] = True
        lengths = [random.choice([0, 1, 2, 3, 5, 8, 16, 17, 31]) for _ in range(random.choice([2, 3]))]
        if not sum(lengths) or (RULES[fields["rule"]].anchor == "token" and net in ("titans", "residual")):
            continue
        count -= 1
        yield fields, lengths, random.choice([0.1, 1.0, 30.0])


@torch.no_grad()
def test_packed_states_are_the_states_of_separate_calls():
    """Nets x rules x chunks x convolutions x gates; a memory that diverges does so in both."""
    for seed, (fields, lengths, scale) in enumerate(settings(80)):
        torch.manual_seed(seed)
        memory = NeuralMemory(**fields)
        x, borders = scale * torch.randn(1, sum(lengths), 16), [0, *accumulate(lengths)]
        packed = memory(x, offsets=borders)[1]
        for row, (a, b) in enumerate(pairwise(borders)):
            alone, here = memory(x[:, a:b])[1], packed.rows(row)
            case = f"{fields}, document {row} of {lengths}"
            assert torch.equal(alone.diverged, here.diverged), case
            large = max(float(layer.abs().max()) for layer in alone.memory.layers)
            if alone.diverged or large > 100:  # rounding errors grow as fast as the memory does
                continue
            for (path, one), (_, other) in zip(parts(alone), parts(here), strict=True):
                for a_tensor, b_tensor in zip(one.tensors(), other.tensors(), strict=True):
                    torch.testing.assert_close(
                        a_tensor,
                        b_tensor,
                        rtol=1e-3,
                        atol=1e-4,
                        msg=lambda text, where=f"{path}, {case}": f"{where}: {text}",
                    )


@torch.no_grad()
def test_a_document_beside_one_that_diverges():
    """A setting whose short documents were flagged because of the padding up to the long one."""
    torch.manual_seed(883172)
    fields = {"net": "residual", "depth": 3, "bias": True, "rule": "no_forget", "chunk": 4}
    memory = NeuralMemory(dim=16, heads=2, step_bias=0.0, momentum_bias=3.0, **fields)
    x, borders = 10 * torch.randn(1, 33, 16), [0, 8, 16, 33]
    packed = memory(x, offsets=borders)[1]
    alone = [bool(memory(x[:, a:b])[1].diverged) for a, b in pairwise(borders)]
    assert packed.diverged.tolist() == alone
