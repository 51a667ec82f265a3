"""A run on a text of one's own: how it is read, how long the run takes, and what it has achieved."""

from __future__ import annotations

import lzma
import os
from dataclasses import replace
from math import log
from statistics import median
from typing import NamedTuple

import torch

from remanence.data import Documents, Packed
from remanence.data.own import OwnText, OwnTokens, read_text
from remanence.inference.reader import traces
from remanence.io.migrations import warn_deprecated
from remanence.model import Model
from remanence.runtime.device import fastest_threads, resolve
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from remanence.train.config import TrainConfig
from remanence.train.data_config import TextData
from remanence.train.loss import token_losses
from remanence.train.plan import measured

SECONDS = 360
"""Of training, as timed before it: other work on the machine may make it half as long again."""
READINGS = 4
"""How often a text is read at most. A short one would be learned by heart."""
FEWEST = 20
"""Steps at least."""
PROBE = 16
"""Tokens of a short trial that finds out whether other processes use the cores."""
BEFORE = 1 << 14
"""Tokens that a model reads before the held-out part, if a document goes on there."""
XZ = 1 << 23
"""Bytes that xz reads before it."""


def path_of(config: TrainConfig) -> str | None:
    assert isinstance(config.data, TextData)
    return config.data.path


def own_tokens(config: TrainConfig, tokenizer: Tokenizer, rows: int) -> OwnTokens:
    """What a run trains on: stretches for each row if it carries its memory, else documents as they are."""
    text = read_text("data.path", path_of(config))
    return OwnTokens(text, tokenizer, rows if config.carry else None)


def source(config: TrainConfig, batch: int, rank: int, world: int) -> Packed | Documents:
    """The source of the kind "text"."""
    tokens = own_tokens(config, tokenizer_for(config), batch * world)
    kind = Documents if config.carry else Packed
    return kind(tokens, config.data.length, batch, config.seed, rank, world)


def held_out_source(config: TrainConfig, batch: int, rank: int, world: int) -> Packed:
    """The end of the text, which is not trained on, for validation."""
    held = read_text("data.path", path_of(config)).held
    tokens = OwnTokens(OwnText(held, [], False), tokenizer_for(config))
    return Packed(tokens, config.data.length, batch, config.seed, rank, world)


def tokenizer_for(config: TrainConfig) -> Tokenizer:
    """That of the model which the run begins from, else bytes."""
    return ByteTokenizer() if config.init_from is None else load_tokenizer(config.init_from)


def fit_time_budget(config: TrainConfig) -> TrainConfig:
    """A config whose steps take a few minutes on this machine, and read the text a few times at most. Memories are
    carried unless documents are short; those are packed.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("steps: expected --steps=N with several processes, which would each time their own")
    text = read_text("data.path", path_of(config))
    step = config.batch * config.data.length
    choose_threads(config)
    seconds = step / _rate(config)
    readings = READINGS * text.size // step
    steps = max(FEWEST, min(int(SECONDS / seconds), readings))
    carry = config.carry and text.size >= 2 * config.data.length * len(text.train)
    return replace(config, steps=steps, carry=carry)


def choose_threads(config: TrainConfig) -> None:
    """Train with as many threads as are fastest on this machine now (`runtime/device.py: fastest_threads`)."""
    device, alone = resolve(config.device), replace(config, batch=1, accumulate=1)
    short = replace(alone, data=replace(alone.data, length=min(PROBE, alone.data.length)))
    if device.type == "cpu":
        fastest = fastest_threads(lambda: measured(alone, device), lambda: measured(short, device))
        torch.set_num_threads(fastest)


def _rate(config: TrainConfig) -> float:
    """Tokens per second of one row, as the median of three timings, as other work comes and goes."""
    device, alone = resolve(config.device), replace(config, batch=1, accumulate=1)
    return median(measured(alone, device) for _ in range(3))


class HeldOut(NamedTuple):
    """Bits per byte of a held-out part: a model's, and those of ``xz -9``, after the text before it and alone."""

    bytes: int
    model: float
    xz_after: float
    xz_alone: float


@torch.no_grad()
def held_out(model: Model, tokenizer: Tokenizer, text: OwnText) -> HeldOut:
    """Measure a model on what was held out. It has read the text right before, as far as the same document goes on."""
    place, nats = model.embed.weight.device, 0.0
    for number, document in enumerate(text.held):
        before = _encoded(tokenizer, text.train[-1][-BEFORE:]) if text.cut and not number else []
        # Without anything before it, a document's first token does not count, as everywhere.
        tokens = torch.tensor([before + _encoded(tokenizer, document)], device=place)
        for part, trace in traces(model, tokens[:, :-1]):
            targets = tokens[0, 1:][part]
            losses = token_losses(model.logits(trace.hidden[0]), targets)
            nats += float(losses[max(0, len(before) - 1 - part.start) :].double().sum())
    held, read = b"".join(text.held), b"".join(text.train)[-XZ:]
    after = _xz(read + held) - _xz(read)
    bits = nats / log(2), 8 * after, 8 * _xz(held)
    return HeldOut(len(held), *(each / len(held) for each in bits))


def _encoded(tokenizer: Tokenizer, text: bytes) -> list[int]:
    return [token for piece in tokenizer.stream([text]) for token in piece]


def _xz(data: bytes) -> int:
    return len(lzma.compress(data, preset=9))


def __getattr__(name: str) -> object:
    if name == "sized":
        warn_deprecated("remanence.train.text.sized", "remanence.train.text.fit_time_budget")
        return fit_time_budget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
