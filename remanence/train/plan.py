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
from remanence.train.speeds import reached, table

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bfloat16 operations per second, as the makers state them, by a part of the GPU's name."""

GPUS = {"B200": 180, "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "4090": 24, "3090": 24}
"""Memory in GB, for planning without the GPU."""

SMALL = 50_000_000
"""Parameters up to which the host's calls are likely to take longer than the GPU's arithmetic; a guess, not measured.
"""


def peak(device: torch.device) -> float | None:
    """The GPU's stated peak, if known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward and backward, 2 for a multiplication and addition: every matrix once, attention over what it sees, and a
    memory four times its weights (keys forward, errors back, the write, the read). A deep memory's first layers see
    queries and keys.
    """
    with torch.device("meta"):
        model = Model(config)
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if ".ffn." in name)
    matrices += config.vocab_size * config.dim  # the head: an embedding is looked up, tied or not
    return 6.0 * matrices + sum(mixer.flops(length) for mixer in model.mixers)


class Plan(NamedTuple):
    """The estimates that `--dry-run` prints."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, float]
    """Bytes of one device, by what they are for."""
    available: float
    rate: float
    """Tokens per second."""
    basis: str
    """Where the rate comes from."""

    @property
    def needed(self) -> float:
        return sum(self.memory.values())

    @property
    def hours(self) -> float:
        return self.tokens / self.rate / 3600


def plan(config: TrainConfig, gpus: int | None = None, gpu: str = "H100") -> Plan:
    """The costs on so many GPUs of a kind; without a number, on this machine's device, timed on a few rows. An error if
    it cannot fit.
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
    _refuse(memory, available, config, devices)  # before anything is tried out
    parameters = count_parameters(config.model)
    tokens = config.steps * config.batch * config.data.length
    per_token = flops_per_token(config.model, config.data.length)
    if gpus is None:
        device = resolve(config.device)
        rate, basis = measured(config, device), f"timed on this machine's {device.type}"
    else:
        rate, basis = estimated(config, gpus, gpu)
        basis += "; a model this small is likely slower" if parameters <= SMALL else ""
    return Plan(parameters, tokens, tokens * per_token, memory, available, rate, basis)


def estimated(config: TrainConfig, gpus: int, gpu: str) -> tuple[float, str]:
    """Tokens per second of so many GPUs, by the share of the peak that each kind of block has reached where it was
    measured; a model of several kinds takes the mean of the times that models of one each would take.
    """
    length, seconds, told = config.data.length, 0.0, []
    recomputed = False
    captured = (
        gpus == 1 and config.graph is not False and config.data.kind != "packed" and config.accumulate == 1
    )
    for kind in dict.fromkeys(config.model.blocks):
        found = reached(kind, config.model, length, captured and config.initial_state == "fresh")
        again = config.checkpointing and not found.checkpointing  # one forward more for three
        cost = flops_per_token(replace(config.model, pattern=(kind,)), length) * (4 / 3 if again else 1)
        seconds += (
            config.model.blocks.count(kind) / config.model.num_layers * cost / (PEAKS[gpu] * found.share)
        )
        told.append(found.told)
        recomputed |= again
    basis = f"from the {table()['preset']} preset on one {table()['gpu']}: {'; '.join(told)}"
    basis += "; a third more for checkpointing" if recomputed else ""
    basis += "" if captured else "; not as one CUDA graph (packed documents, several GPUs or parts of a step)"
    basis += "; other sizes and GPUs differ"
    basis += ", and what GPUs exchange is not counted" if gpus > 1 else ""
    return gpus / seconds, basis


def measured(config: TrainConfig, device: torch.device) -> float:
    """Tokens per second, forward and backward, of one part's rows, or as many of them as make a few thousand tokens."""
    most = 32_768 if device.type == "cuda" else 2048
    length = min(config.data.length, most)
    rows = max(1, min(config.batch // config.accumulate, most // length))
    torch.manual_seed(0)
    model = Model(config.model).to(device).train()
    model.checkpointing = config.checkpointing
    tokens = torch.randint(config.model.vocab_size, (rows, length), device=device)
    for _ in range(2):  # the first is for warming up
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            logits, _ = model(tokens)
        logits.float().logsumexp(-1).mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
    return rows * length / took


def activations(config: TrainConfig) -> float:
    """Bytes that a token leaves for backward, as each mixer estimates it."""
    with torch.device("meta"):
        model = Model(config.model)
    wide = 1.0 if config.precision == "bfloat16" else 1.6
    layers = [wide * mixer.activation_bytes(config.model.dim) for mixer in model.mixers]
    residual = 4.0 * config.model.dim * config.model.num_layers
    return residual + max(layers) if config.checkpointing else float(sum(layers))


def memory_of_run(config: TrainConfig, devices: int = 1) -> dict[str, float]:
    """Bytes of one device that a run needs, by what they are for."""
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


def _refuse(memory: dict[str, float], available: float, config: TrainConfig, devices: int) -> None:
    """Refuse a run that does not fit into memory, and suggest options with which it fits."""
    if sum(memory.values()) <= available:
        return
    largest = max(memory, key=lambda part: memory[part])
    helps = "no smaller batch fits; more GPUs share it, a smaller model or data.length needs less"
    for options, changed in smaller(config):
        rows, rest = divmod(changed.batch, changed.accumulate * devices)
        if not rest and not (config.initial_state == "neighbor" and rows % 2):
            needed = sum(memory_of_run(changed, devices).values())
            if needed <= available:
                helps = f"{options} needs about {needed / 1e9:.1f}"
                break
    raise ValueError(
        f"memory: expected at most {available / 1e9:.1f} GB on a device, needs about {sum(memory.values()) / 1e9:.1f}, "
        f"most of it for {largest}; {helps}"
    )


def smaller(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Options with which a run needs less memory, the mildest first, and its config with them: activations computed
    again, a step's rows read in parts where the run allows it, then fewer rows.

    Every option is accepted by the command that it is an advice for.
    """
    kept = [{}] if config.checkpointing else [{}, {"checkpointing": "true"}]
    halves = [2**power for power in range(config.batch.bit_length())]
    parts = [{"accumulate": f"{config.accumulate * many}"} if many > 1 else {} for many in halves]
    fewer = [_fewer_rows(config, config.batch // many) for many in halves[1:]]
    for changes in [{**keep, **less} for less in (*parts, *fewer) for keep in kept]:
        try:
            changed = override(config, changes)
        except ValueError:  # a run that carries its memory cannot be read in parts, ...
            continue
        if changes:
            yield " ".join(f"--{name}={value}" for name, value in changes.items()), changed


def _fewer_rows(config: TrainConfig, batch: int) -> dict[str, str]:
    """Fewer rows; those of a curriculum are no longer than a step then."""
    tokens, lengths = batch * config.data.length, config.data.stages
    fitting = tuple(length for length in lengths if not length or tokens % length == 0)
    changes = {"batch": f"{batch}"}
    return changes if fitting == lengths else changes | {"data.curriculum": ",".join(map(str, fitting))}
