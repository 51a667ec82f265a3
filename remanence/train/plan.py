"""What a run will cost, before it is begun: parameters, arithmetic, memory of a GPU, hours. Estimates, and told as such."""

from __future__ import annotations

from typing import NamedTuple

import torch

from remanence.config import ModelConfig
from remanence.model import Model
from remanence.train.config import TrainConfig

PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}
"""Dense bfloat16 operations per second, as the makers state them, by a part of the GPU's name."""

GPUS = {"B200": 180, "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "4090": 24, "3090": 24}
"""Memory in GB, for planning without the GPU."""

ASSUMED = 0.3
"""Share of the peak that a well-kept run reaches; `mfu` in the metrics tells what yours does."""


def peak(device: torch.device) -> float | None:
    """The GPU's stated peak, if known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward and backward, 2 for a multiplication and addition: every matrix once, attention over what it sees, and a memory
    four times its weights (keys forward, errors back, the write, the read).
    """
    with torch.device("meta"):
        model = Model(config)
    seen, starts = 0.0, 0
    for name, block in zip(config.blocks, model.blocks, strict=True):
        for part, parameter in block.named_parameters():
            if ".initial." in part:
                starts += parameter.numel()
        if name == "attention":
            seen += length / 2
        elif name in ("window", "mag", "mal"):
            seen += min(length / 2, config.window + config.persistent)
        elif name == "mac":
            seen += config.segment + config.persistent  # half of twice the segment: retrieved tokens, and the segment's own
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1) - starts
    matrices += 0 if config.tie else -config.vocabulary * config.dim  # an embedding is looked up, tied or not
    return 3 * (2 * matrices + 8 * starts + 4 * config.dim * seen)


class Plan(NamedTuple):
    """Everything `--dry-run` tells."""

    parameters: int
    tokens: int
    flops: float
    gpus: int
    gpu: str
    memory: dict[str, float]
    available: float
    hours: float

    @property
    def needed(self) -> float:
        """Bytes of each GPU."""
        return sum(self.memory.values())


def plan(config: TrainConfig, gpus: int, gpu: str) -> Plan:
    """The costs on so many GPUs of this kind."""
    rows = config.batch // (config.accumulate * gpus)
    if rows < 1 or config.batch % (config.accumulate * gpus):
        raise ValueError(
            f"batch: expected a multiple of accumulate x GPUs = {config.accumulate} x {gpus}, got {config.batch}; "
            "each GPU reads the same number of rows"
        )
    with torch.device("meta"):
        model = Model(config.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    block = max(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
    root = parameters - sum(parameter.numel() for each in model.blocks for parameter in each.parameters())
    here = rows * config.data.length
    memory = {
        "weights, gradients and moments": 16.0 * parameters / gpus,
        "gathered weights and their gradients": 8.0 * (2 * block + root) if gpus > 1 else 0.0,
        "activations": here * activations(config),
        "logits": here * config.model.vocabulary * 10.0,
    }
    tokens = config.steps * config.batch * config.data.length
    flops = tokens * flops_per_token(config.model, config.data.length)
    hours = flops / (PEAKS[gpu] * ASSUMED * gpus) / 3600
    return Plan(parameters, tokens, flops, gpus, gpu, memory, GPUS[gpu] * 1e9, hours)


def activations(config: TrainConfig) -> float:
    """Bytes that a token leaves for backward."""
    model = config.model
    layers = [BYTES[name] * model.dim for name in model.blocks]
    if config.checkpointing:
        return 4.0 * model.dim * model.depth + max(layers)
    return float(sum(layers))


def smaller(config: TrainConfig) -> str:
    """What to change so that it fits."""
    if not config.checkpointing:
        return "--checkpointing=true keeps less"
    return f"--accumulate={2 * config.accumulate} reads fewer rows at once" if config.batch > 1 else "more GPUs share the weights"


def fits(config: TrainConfig, gpus: int, gpu: str) -> Plan:
    """The plan, or an error that says what does not fit and what would help."""
    made = plan(config, gpus, gpu)
    if made.needed > made.available:
        largest = max(made.memory, key=lambda part: made.memory[part])
        raise ValueError(
            f"memory: expected at most {made.available / 1e9:.0f} GB on each of {gpus} {gpu}, needs about "
            f"{made.needed / 1e9:.0f}, most for {largest}; {smaller(config)}"
        )
    return made


BYTES = {
    "attention": 60,
    "window": 60,
    "lmm": 120,
    "mag": 160,
    "mal": 160,
    "mac": 220,
    "linear_attention": 120,
    "delta": 120,
    "gated_delta": 120,
    "ttt": 120,
}
