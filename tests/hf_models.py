"""A Hugging Face model around a small native one, and what its tests share."""

import pytest
import torch
from models import model, tokens

transformers = pytest.importorskip("transformers")

from remanence.hf import RemanenceConfig, RemanenceForCausalLM  # noqa: E402

NAMES = [
    "mac",
    "mag",
    "mal",
    "lmm",
    "attention",
    "window",
    "hybrid",
    "knn",
    "both memories",
    "one store, rare tokens",
]


def wrapped(variant="mac", dtype=torch.float32, **fields):
    """A Hugging Face model around `model(variant)`, which is its `.model`."""
    native = model(variant, dtype, **fields)
    outer = RemanenceForCausalLM(RemanenceConfig(native.config)).to(dtype).eval()
    outer.model.load_state_dict(native.state_dict())
    return outer


def greedy(native, prompt, count):
    """Greedy decoding by hand: the oracle."""
    logits, state = native(prompt)
    found = [prompt]
    for _ in range(count):
        found.append(logits[:, -1:].argmax(-1))
        logits, state = native(found[-1], state)
    return torch.cat(found, 1)


def padded(count=12):
    """Prompts of different lengths, left-padded: tokens, mask, and the prompts themselves."""
    x = tokens(3, count)
    mask = torch.ones(3, count, dtype=torch.int64)
    mask[0, :7] = 0
    mask[1, :1] = 0
    mask[2, :3] = 0
    return x, mask, [x[row, mask[row] == 1][None] for row in range(3)]
