"""Estimates of the cost of a run before it starts: parameters, floating-point operations, GPU memory, hours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from remanence.config import ModelConfig
from remanence.model import Model
from remanence.model import parameters as count_parameters
from remanence.runtime.choices import check_choice
from remanence.runtime.device import memory_of, resolve
from remanence.train.config import TrainConfig, override
from remanence.train.speeds import speed_of, table

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""The peak of each GPU in dense bfloat16 operations per second, from data sheets.

A key is a part of the GPU's name.
"""

GPUS = {"B200": 180, "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "4090": 24, "3090": 24}
"""The memory of each GPU in GB, for planning without access to the GPU."""

SMALL = 50_000_000
"""The number of parameters up to which kernel launches probably take longer than the GPU's arithmetic.

This is a guess, not a measurement.
"""


def peak(device: torch.device) -> float | None:
    """Return the peak of a GPU in operations per second, or None for other devices and unknown GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the floating-point operations of the forward and backward pass per token, for rows of `length`
    tokens.

    A multiplication with an addition counts as 2. Every matrix is used once, attention counts the tokens that
    it sees, and a memory counts four times its weights (keys forward, errors backward, the write, the read).
    The first layers of a deep memory process both queries and keys.
    """
    with torch.device("meta"):
        model = Model(config)
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if ".ffn." in name)
    matrices += config.vocab_size * config.dim  # the output head; looking up an embedding costs nothing
    return 6.0 * matrices + sum(mixer.flops(length) for mixer in model.mixers)


class Plan(NamedTuple):
    """The estimates that `--dry-run` prints. `tokens` and `flops` are those of the whole run."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, float]
    """The bytes needed on one device, by purpose."""
    available: float
    """The memory of one device in bytes."""
    rate: float
    """The training speed in tokens per second."""
    basis: str
    """A description of how `rate` was obtained."""

    @property
    def needed(self) -> float:
        """The bytes needed on one device."""
        return sum(self.memory.values())

    @property
    def hours(self) -> float:
        """The estimated duration of the run."""
        return self.tokens / self.rate / 3600


def plan(config: TrainConfig, gpus: int | None = None, gpu: str = "H100") -> Plan:
    """Estimate the cost of a run on `gpus` GPUs of the kind `gpu`. Raise an error if it does not fit into
    memory.

    If `gpus` is None, the estimate is for this machine's device, and its speed is timed on a few rows.
    """
    check_choice("gpu", gpu, GPUS)
    if not config.data.causal_lm:
        raise ValueError(f"data.kind: expected a kind of tokens for --dry-run, got {config.data.kind!r}")
    devices = gpus or 1
    shares = config.accumulate * devices
    if config.batch % shares:
        raise ValueError(f"batch: expected a multiple of accumulate x GPUs = {shares}, got {config.batch}")
    memory = memory_of_run(config, devices)
    available = GPUS[gpu] * 1e9 if gpus else memory_of(resolve(config.device))
    _check_memory(memory, available, config, devices)  # before anything is timed
    parameters = count_parameters(config.model)
    tokens = config.steps * config.batch * config.data.length
    per_token = flops_per_token(config.model, config.data.length)
    if gpus is None:
        device = resolve(config.device)
        rate, basis = measure_rate(config, device), f"timed on this machine's {device.type}"
    else:
        rate, basis = estimate_rate(config, gpus, gpu)
        basis += "; a model this small is likely slower" if parameters <= SMALL else ""
    return Plan(parameters, tokens, tokens * per_token, memory, available, rate, basis)


def estimate_rate(config: TrainConfig, gpus: int, gpu: str) -> tuple[float, str]:
    """Estimate the training speed on `gpus` GPUs. Return tokens per second and a description of the estimate.

    It uses the fraction of the peak that each kind of block has reached in measurements (`speeds.json`). The
    time of a model with several kinds of block is the weighted mean of the times of models with one kind
    each.
    """
    length, seconds, descriptions = config.data.length, 0.0, []
    recomputed = False
    captured = (
        gpus == 1 and config.graph is not False and config.data.kind != "packed" and config.accumulate == 1
    )
    for kind in dict.fromkeys(config.model.blocks):
        speed = speed_of(kind, config.model, length, captured and config.initial_state == "fresh")
        recomputes = config.checkpointing and not speed.checkpointing  # one more forward: a third of the cost
        cost = flops_per_token(replace(config.model, pattern=(kind,)), length) * (4 / 3 if recomputes else 1)
        seconds += (
            config.model.blocks.count(kind) / config.model.num_layers * cost / (PEAKS[gpu] * speed.share)
        )
        descriptions.append(speed.description)
        recomputed |= recomputes
    basis = f"from the {table()['preset']} preset on one {table()['gpu']}: {'; '.join(descriptions)}"
    basis += "; a third more for checkpointing" if recomputed else ""
    basis += "" if captured else "; not as one CUDA graph (packed documents, several GPUs or parts of a step)"
    basis += "; other sizes and GPUs differ"
    basis += ", and what GPUs exchange is not counted" if gpus > 1 else ""
    return gpus / seconds, basis


def measure_rate(config: TrainConfig, device: torch.device) -> float:
    """Time the forward and backward pass on a few thousand tokens at most, and return the tokens per second."""
    max_tokens = 32_768 if device.type == "cuda" else 2048
    length = min(config.data.length, max_tokens)
    rows = max(1, min(config.batch // config.accumulate, max_tokens // length))
    torch.manual_seed(0)
    model = Model(config.model).to(device).train()
    model.checkpointing = config.checkpointing
    tokens = torch.randint(config.model.vocab_size, (rows, length), device=device)
    for _ in range(2):  # the first pass is a warm-up
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            logits, _ = model(tokens)
        logits.float().logsumexp(-1).mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return rows * length / seconds


def activations(config: TrainConfig) -> float:
    """Estimate the bytes of activations that are kept per token for the backward pass."""
    with torch.device("meta"):
        model = Model(config.model)
    dtype_factor = 1.0 if config.precision == "bfloat16" else 1.6
    layers = [dtype_factor * mixer.activation_bytes(config.model.dim) for mixer in model.mixers]
    residual = 4.0 * config.model.dim * config.model.num_layers
    return residual + max(layers) if config.checkpointing else float(sum(layers))


def memory_of_run(config: TrainConfig, devices: int = 1) -> dict[str, float]:
    """Estimate the bytes that a run needs on each of `devices` devices, by purpose."""
    shares = config.accumulate * devices
    with torch.device("meta"):
        model = Model(config.model)
        state = model.start(1).nbytes
    copies = 2.0 if config.carry or any(mixer.stride is not None for mixer in model.mixers) else 1.0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    here = config.batch // shares * config.data.length
    return {
        "weights, gradients, moments": 16.0 * parameters / devices,
        "gathered weights and gradients": 8.0 * (2 * max(blocks) + parameters - sum(blocks))
        if devices > 1
        else 0.0,
        "activations": here * activations(config),
        "logits": here * config.model.vocab_size * 10.0,
        "states, before and after a step": copies * config.batch // shares * state,
    }


def _check_memory(memory: dict[str, float], available: float, config: TrainConfig, devices: int) -> None:
    """Raise an error if a run does not fit into memory, and suggest options with which it fits."""
    if sum(memory.values()) <= available:
        return
    largest = max(memory, key=lambda part: memory[part])
    suggestion = "no smaller batch fits; more GPUs share it, a smaller model or data.length needs less"
    for options, changed in smaller_configs(config):
        rows, rest = divmod(changed.batch, changed.accumulate * devices)
        if not rest and not (config.initial_state == "neighbor" and rows % 2):
            needed = sum(memory_of_run(changed, devices).values())
            if needed <= available:
                suggestion = f"{options} needs about {needed / 1e9:.1f}"
                break
    raise ValueError(
        f"memory: expected at most {available / 1e9:.1f} GB on a device, needs about {sum(memory.values()) / 1e9:.1f}, "
        f"most of it for {largest}; {suggestion}"
    )


def smaller_configs(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield command line options that reduce the memory of a run, and the config with them. The mildest come
    first.

    The options recompute activations, then split the rows of a step into parts if the run allows it, then
    reduce the number of rows. ``remanence train`` accepts all of them.
    """
    kept = [{}] if config.checkpointing else [{}, {"checkpointing": "true"}]
    halves = [2**power for power in range(config.batch.bit_length())]
    parts = [{"accumulate": f"{config.accumulate * many}"} if many > 1 else {} for many in halves]
    fewer = [_fewer_rows(config, config.batch // many) for many in halves[1:]]
    for changes in [{**keep, **less} for less in (*parts, *fewer) for keep in kept]:
        try:
            changed = override(config, changes)
        except ValueError:  # for example, a run that carries its memory cannot be split into parts
            continue
        if changes:
            yield " ".join(f"--{name}={value}" for name, value in changes.items()), changed


def _fewer_rows(config: TrainConfig, batch: int) -> dict[str, str]:
    """Return the options for a smaller batch, without the stages of a curriculum that no longer divide a
    step.
    """
    tokens, lengths = batch * config.data.length, config.data.stages
    fitting = tuple(length for length in lengths if not length or tokens % length == 0)
    changes = {"batch": f"{batch}"}
    return changes if fitting == lengths else changes | {"data.curriculum": ",".join(map(str, fitting))}
