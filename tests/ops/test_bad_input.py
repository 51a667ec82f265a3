"""What does not fit is refused in one line that names the argument, what came and what was expected."""

import pytest
import torch
from cases import Case

from remanence.ops import MLP, NETS, Gates, Rule, memorize, recall, start


def good(**changes):
    case = Case(dtype=torch.float32, tokens=5)
    q, k, v, log_step, log_momentum, log_keep, *rest = (x.detach() for x in case.leaves())
    state = start(tuple(rest[:2]), 2, chunk=4)
    call = {
        "q": q,
        "k": k,
        "v": v,
        "gates": Gates(log_step, log_momentum, log_keep),
        "state": state,
        "net": case.net,
        "chunk": 4,
    }
    return {**call, "check": True, **changes}


def test_the_good_call_is_good():
    y, state, surprise = memorize(**good())
    assert y.shape == (2, 5, 2, 4)
    assert surprise.shape == (2, 5, 2)
    assert state.position.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: {"q": c["q"][0]},
            r"q: expected a floating-point tensor \[batch, tokens, heads, width\], got \[5, 2, 4\]",
        ),
        (lambda c: {"q": None}, "q: expected a floating-point tensor .* got NoneType"),
        (lambda c: {"k": c["k"][:, :4]}, r"k: expected shape \[2, 5, 2, 4\] \(like q\), got \[2, 4, 2, 4\]"),
        (lambda c: {"v": c["v"].double()}, "v: expected torch.float32 on .* got torch.float64"),
        (lambda c: {"gates": tuple(c["gates"])}, "gates: expected Gates"),
        (
            lambda c: {"gates": c["gates"]._replace(log_step=c["gates"].log_step[..., :1])},
            r"gates.log_step: expected shape \[2, 5, 2\]",
        ),
        (
            lambda c: {"gates": c["gates"]._replace(log_keep=None)},
            "gates.log_keep: expected a tensor of shape .* got NoneType",
        ),
        (
            lambda c: {"gates": c["gates"].map(lambda g: g.bfloat16())},
            "gates.log_step: expected torch.float32",
        ),
        (
            lambda c: {"rule": Rule(momentum=False)},
            "state: expected one of a rule with momentum=False, got momentum=True",
        ),
        (lambda c: {"chunk": 0}, "chunk: expected an integer of at least 1, got 0"),
        (lambda c: {"chunk": 2.5}, "chunk: expected an integer of at least 1, got 2.5"),
        (lambda c: {"chunk": 8}, "state: expected chunk 8, got chunk 4"),
        (
            lambda c: {"state": c["state"].rows(0)},
            "state: expected 2 rows, one for each row of the batch, got 1",
        ),
        (
            lambda c: {"state": c["state"].map(lambda x: x.double())},
            "state: expected dtype torch.float32 for q of torch.float32",
        ),
        (lambda c: {"state": None}, "state: expected a MemoryState .* got NoneType"),
        (lambda c: {"net": MLP(depth=3)}, "state: expected weights of shapes"),
        (lambda c: {"net": "titans"}, "net: expected an object with init and apply, got str"),
        (lambda c: {"rule": "titans"}, "rule: expected a Rule .* got str"),
        (
            lambda c: {"rule": Rule(anchor="token")},
            "rule: anchor='token' needs a memory linear in its weights",
        ),
        (
            lambda c: {"backend": "cuda"},
            "backend: expected 'auto' or one of reference, chunked, triton, got 'cuda'",
        ),
        (lambda c: {"offsets": [0, 2, 5]}, "offsets: expected a single batch row of packed documents"),
        (lambda c: {"q": c["q"] / 0}, "q: expected finite numbers, got 80 infinite or NaN of 80"),
        (
            lambda c: {"gates": c["gates"]._replace(log_momentum=c["gates"].log_momentum + 9)},
            "gates.log_momentum: expected logs of at most 0",
        ),
        (
            lambda c: {"gates": c["gates"]._replace(log_keep=c["gates"].log_keep * torch.nan)},
            "gates.log_keep: expected logs of at most 0",
        ),
        (
            lambda c: {"gates": c["gates"]._replace(log_step=c["gates"].log_step * -torch.inf)},
            "gates.log_step: expected logs below inf",
        ),
    ],
)
def test_memorize_refuses(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        memorize(**good(**change(good())))
    assert "\n" not in str(caught.value)


def test_unchecked_mode_does_not_look_at_values():
    call = good(check=False)
    call["q"] = call["q"] / 0
    y, state, _ = memorize(**call)
    assert not y.isfinite().all()
    assert state.diverged.all(), "unlooked-at NaN is still not passed on in silence"


def test_recall_and_start_refuse():
    call = good()
    with pytest.raises(ValueError, match="state: expected 1 rows"):
        recall(call["q"][:1], call["state"])
    with pytest.raises(ValueError, match="rows: expected an integer of at least 0, got -1"):
        start(NETS["titans"].init(1, 4), -1)
    with pytest.raises(ValueError, match="momentum: expected None for a rule without momentum"):
        start(NETS["titans"].init(1, 4), 1, rule=Rule(momentum=False), momentum=NETS["titans"].init(1, 4))
    with pytest.raises(
        ValueError, match=r"momentum: expected tensors of shapes \[\[2, 1, 4, 16\], \[2, 1, 16, 4\]\]"
    ):
        start(NETS["titans"].init(1, 4), 2, momentum=NETS["titans"].init(1, 4))
    with pytest.raises(ValueError, match="weights: expected a tuple of tensors"):
        start(torch.zeros(1, 4, 4), 1)
    for wrong, message in (
        ({"net": "titans"}, "net: expected an object"),
        ({"rule": "titans"}, "rule: expected a Rule"),
    ):
        with pytest.raises(ValueError, match=message):
            recall(call["q"], call["state"], **wrong)
    for offsets in (5, [], [0, 2.7, 5], torch.tensor([0.0, 5.0])):
        with pytest.raises(ValueError, match="offsets: expected integers"):
            memorize(**good(offsets=offsets))
    with pytest.raises(
        ValueError, match=r"offsets: expected a single batch row of packed documents, got a batch of 2"
    ):
        memorize(**good(offsets=[0]))
    with pytest.raises(ValueError, match="chunk: expected an integer"):
        start(NETS["titans"].init(1, 4), 1, chunk=-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(depth=0), "depth: expected 1, 2, 3 or 4 layers, got 0"),
        (lambda: MLP(expansion=-1), "expansion: expected a positive number, got -1"),
        (lambda: MLP(activation="relu"), "activation: expected 'gelu' or 'silu', got 'relu'"),
        (lambda: Rule(anchor="document"), "anchor: expected 'chunk' or 'token', got 'document'"),
        (lambda: Rule(loss="huber"), "loss: expected a function or one of squared, dot, got 'huber'"),
        (
            lambda: Rule(forget=False, decay_first=True),
            "decay_first: expected False for a rule that does not forget",
        ),
    ],
)
def test_nets_and_rules_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
