"""Writing has its price: what a memory does not need to write, it learns to pass over."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from remanence import Model, ModelConfig
from remanence.tasks.recall import Recall
from remanence.train import DataConfig, TrainConfig, fit
from remanence.train.engine import make_optimizer, take_step

MODEL = ModelConfig(
    vocab_size=20, dim=16, num_layers=2, heads=2, pattern=("lmm",), memory={"heads": 2, "threshold": 0.1}
)
DATA = DataConfig(kind="recall", length=48, pairs=4, rounds=2, keys=8, noise=4)
CONFIG = TrainConfig(model=MODEL, data=DATA, steps=10, batch=4, write_cost=0.5, device="cpu")


def batches(parts=1):
    whole = Recall(48, 4, 4, 2, 0, keys=8, noise=4).step(0)
    rows = 4 // parts
    return [
        whole._replace(tokens=whole.tokens[at : at + rows], targets=whole.targets[at : at + rows])
        for at in range(0, 4, rows)
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_those_of_the_written_loss(parts):
    torch.manual_seed(0)
    model = Model(MODEL)
    (whole,) = batches()
    seen = model.trace(whole.tokens)
    asked = whole.targets >= 0
    loss = F.cross_entropy(model.logits(seen.hidden[asked]), whole.targets[asked])
    # The eighth of ten steps: the cost grows over the last five.
    steps = torch.stack([each.gates.log_step for each in seen.traces]).exp() * 0.9 + 0.1
    wanted = torch.autograd.grad(loss + 0.5 * 0.6 * (steps / 0.1).log().mean(), list(model.parameters()))
    config = replace(CONFIG, accumulate=parts, optimizer=replace(CONFIG.optimizer, clip=1e9))
    step = take_step(model, make_optimizer(model, config), config, batches(parts), None, 7)
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5), (
        "the cost is not part of the loss that is told"
    )
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)


def test_the_first_half_is_free():
    grads = []
    for cost in (0.0, 0.5):
        torch.manual_seed(0)
        model = Model(MODEL)
        config = replace(CONFIG, write_cost=cost)
        take_step(model, make_optimizer(model, config), config, batches(), None, 4)
        grads.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_not_needed_is_passed_over(tmp_path):
    lines = {}
    for cost in (0.0, 5.0):
        config = replace(CONFIG, steps=40, write_cost=cost, optimizer=replace(CONFIG.optimizer, lr=3e-2))
        told = []
        fit(config, tmp_path / str(cost), log=told.append)
        lines[cost] = told[-1]
    assert lines[5.0]["written"] < 0.5
    assert lines[0.0].get("written", 1) > 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"write_cost": -1.0}, "write_cost: expected a number from 0 to 1000, got -1.0"),
        (
            {"model": replace(MODEL, memory=replace(MODEL.memory, threshold=0.0))},
            "write_cost: expected 0, or a neural memory with model.memory.threshold above 0, got threshold=0 and lmm",
        ),
        ({"model": replace(MODEL, pattern=("window",))}, "got threshold=0.1 and window"),
    ],
)
def test_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, **changes)
