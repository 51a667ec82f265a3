"""Train on needles in a haystack: 1,024 bytes of plain sentences with four named numbers. The end asks for
one.

remanence train needle --out out/needle
torchrun --nproc-per-node 8 -m remanence train needle --out out/needle --data.length=8192 --batch=64
"""

from remanence.config import preset
from remanence.train import NeedleData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    return TrainConfig(
        model=preset("small", "mac", num_layers=2, window=128, segment=128),
        data=NeedleData(length=1024, pairs=4),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100, weight_decay=0.01),
        steps=4000,
        batch=16,
    )
