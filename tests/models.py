"""Small models of every variant, for the tests of everything that takes a model."""

import torch

from remanence import Model, ModelConfig
from remanence.blocks import BLOCKS

VARIANTS = {name: (name,) for name in BLOCKS} | {
    "hybrid": ("lmm", "window", "mac"),
    "attention hybrid": ("gated_delta", "attention"),
}
MEMORIES = {name: pattern for name, pattern in VARIANTS.items() if name not in ("attention", "window")}


def config(variant="mac", **fields):
    memory = {"heads": 2, "chunk": 4, "expansion": 2.0, **fields.pop("memory", {})}
    depth = max(2, len(VARIANTS[variant]))
    own = {"vocabulary": 11, "dim": 16, "depth": depth, "heads": 2, "window": 5, "segment": 8, "persistent": 3}
    return ModelConfig(**{**own, "pattern": VARIANTS[variant], "memory": memory, **fields})


def model(variant="mac", dtype=torch.float64, **fields):
    torch.manual_seed(3)
    return Model(config(variant, **fields)).to(dtype)


def tokens(batch=2, count=29, vocabulary=11):
    return torch.randint(vocabulary, (batch, count))
