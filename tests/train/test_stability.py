"""No step is lost: every variant, memories of depth 1 to 4, float32 and bfloat16, 50 steps over 4,096 tokens."""

import itertools

import pytest
import torch

from remanence import Model, ModelConfig
from remanence.data import Batch
from remanence.train import DataConfig, OptimizerConfig, TrainConfig
from remanence.train.engine import make_optimizer, take_step

SETTINGS = list(itertools.product(("mac", "mag", "mal", "lmm"), (1, 2, 3, 4), ("float32", "bfloat16")))


def text(step, length=4096):
    """Bytes with the statistics of a language, roughly: frequent letters, and phrases that come back."""
    chance = torch.Generator().manual_seed(step)
    phrases = (64 * torch.rand(40, 24, generator=chance) ** 3).long()
    return (
        phrases[torch.randint(40, (length // 24 + 1,), generator=chance)].flatten()[: length + 1].unsqueeze(0)
    )


def cases():
    """Every variant, depth and precision in the slow tier; all of their combinations in the exhaustive one."""
    few = {("mac", 1, "float32"), ("mag", 4, "float32"), ("mal", 3, "bfloat16"), ("lmm", 2, "bfloat16")}
    for setting in SETTINGS:
        yield pytest.param(*setting, marks=pytest.mark.slow if setting in few else pytest.mark.exhaustive)


@pytest.mark.parametrize(("variant", "depth", "precision"), list(cases()))
def test_no_step_is_lost(variant, depth, precision):
    memory = {"depth": depth, "heads": 1, "expansion": 2.0, "chunk": 64}
    sizes = {
        "vocab_size": 64,
        "dim": 32,
        "num_layers": 1,
        "heads": 2,
        "window": 128,
        "segment": 256,
        "persistent": 4,
    }
    config = TrainConfig(
        model=ModelConfig(**sizes, pattern=(variant,), memory=memory),
        data=DataConfig(kind="recall"),  # not read: the text is made here
        optimizer=OptimizerConfig(lr=3e-3, warmup=10, schedule="constant"),
        steps=50,
        precision=precision,
        device="cpu",
    )
    torch.manual_seed(0)
    model = Model(config.model).train()
    optimizer = make_optimizer(model, config)
    losses = []
    for number in range(config.steps):
        x = text(number)
        step = take_step(
            model, optimizer, config, [Batch(x[:, :-1], x[:, 1:], None, None, None)], None, number
        )
        assert step.taken, f"step {number}: loss {step.loss}, gradient {step.gradient}"
        assert not step.trace.state.diverged.any()
        losses.append(step.loss)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), "and it learns"
