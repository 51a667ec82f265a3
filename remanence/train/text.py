"""Training on the user's own text: reading it, choosing the number of steps, and evaluating on the held-out
end.
"""

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
from remanence.train.plan import measure_rate

SECONDS = 360
"""The intended training time in seconds, by a timing before the run.

It can be 1.5 times as long on a busy machine.
"""
READINGS = 4
"""How often a run reads the text at most, so that a short text is not memorized."""
FEWEST = 20
"""The smallest number of steps of a run."""
PROBE = 16
"""The number of tokens of a short trial that detects whether other processes use the CPU cores."""
BEFORE = 1 << 14
"""How much text before the held-out part the model reads first, in bytes, if a document continues in that
part.
"""
XZ = 1 << 23
"""How much text before the held-out part xz reads first, in bytes."""


def path_of(config: TrainConfig) -> str | None:
    """Return the path of the text of a run of kind "text"."""
    assert isinstance(config.data, TextData)
    return config.data.path


def own_tokens(config: TrainConfig, tokenizer: Tokenizer, rows: int) -> OwnTokens:
    """Return the tokens to train on.

    If rows carry their memory, documents are split so that each row has one.
    """
    text = read_text("data.path", path_of(config))
    return OwnTokens(text, tokenizer, rows if config.carry else None)


def source(config: TrainConfig, batch: int, rank: int, world_size: int) -> Packed | Documents:
    """Return the source of batches of the kind "text"."""
    tokens = own_tokens(config, tokenizer_for(config), batch * world_size)
    kind = Documents if config.carry else Packed
    return kind(tokens, config.data.length, batch, config.seed, rank, world_size)


def held_out_source(config: TrainConfig, batch: int, rank: int, world_size: int) -> Packed:
    """Return the source of validation batches: the end of the text, which is not trained on."""
    held = read_text("data.path", path_of(config)).held
    tokens = OwnTokens(OwnText(held, [], False), tokenizer_for(config))
    return Packed(tokens, config.data.length, batch, config.seed, rank, world_size)


def tokenizer_for(config: TrainConfig) -> Tokenizer:
    """Return the tokenizer of the model that the run starts from, or the byte tokenizer if there is none."""
    return ByteTokenizer() if config.init_from is None else load_tokenizer(config.init_from)


def fit_time_budget(config: TrainConfig) -> TrainConfig:
    """Return the config with a number of steps that takes a few minutes here and reads the text a few times
    at most.

    If the documents are short, `carry` is turned off and they are packed into rows.
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
    """Set the number of CPU threads to the one that is fastest now (`runtime/device.py: fastest_threads`)."""
    device, alone = resolve(config.device), replace(config, batch=1, accumulate=1)
    short = replace(alone, data=replace(alone.data, length=min(PROBE, alone.data.length)))
    if device.type == "cpu":
        fastest = fastest_threads(lambda: measure_rate(alone, device), lambda: measure_rate(short, device))
        torch.set_num_threads(fastest)


def _rate(config: TrainConfig) -> float:
    """Return the training speed of one row in tokens per second.

    The median of three timings reduces noise.
    """
    device, alone = resolve(config.device), replace(config, batch=1, accumulate=1)
    return median(measure_rate(alone, device) for _ in range(3))


class HeldOut(NamedTuple):
    """The size of the held-out part in bytes, and its bits per byte with the model and with ``xz -9``.

    `xz_after` is for xz after it has read the preceding text, `xz_alone` for the held-out part alone.
    """

    bytes: int
    model: float
    xz_after: float
    xz_alone: float


@torch.no_grad()
def held_out(model: Model, tokenizer: Tokenizer, text: OwnText) -> HeldOut:
    """Measure a model on the held-out part.

    If a document continues there, the model reads its preceding text first.
    """
    device, nats = model.embed.weight.device, 0.0
    for number, document in enumerate(text.held):
        before = _encoded(tokenizer, text.train[-1][-BEFORE:]) if text.cut and not number else []
        # The first token of a document has no loss if no text precedes it.
        tokens = torch.tensor([before + _encoded(tokenizer, document)], device=device)
        for part, trace in traces(model, tokens[:, :-1]):
            targets = tokens[0, 1:][part]
            losses = token_losses(model.logits(trace.hidden[0]), targets)
            nats += float(losses[max(0, len(before) - 1 - part.start) :].double().sum())
    held, train_tail = b"".join(text.held), b"".join(text.train)[-XZ:]
    xz_growth = _xz(train_tail + held) - _xz(train_tail)
    bits = nats / log(2), 8 * xz_growth, 8 * _xz(held)
    return HeldOut(len(held), *(each / len(held) for each in bits))


def _encoded(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Return the tokens of a text that is given as bytes."""
    return [token for piece in tokenizer.stream([text]) for token in piece]


def _xz(data: bytes) -> int:
    """Return the compressed size in bytes."""
    return len(lzma.compress(data, preset=9))


def __getattr__(name: str) -> object:
    if name == "sized":
        warn_deprecated("remanence.train.text.sized", "remanence.train.text.fit_time_budget")
        return fit_time_budget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
