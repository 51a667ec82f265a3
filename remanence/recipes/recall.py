"""Train a tiny MAC on recall beyond its window of 16 tokens: eight key-value pairs, noise, and the same keys
again.

remanence train recall --out out/recall
remanence train recall --out out/recall-lmm --model.pattern=lmm
"""

from remanence.config import ModelConfig
from remanence.train import OptimizerConfig, RecallData, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    model = ModelConfig(
        vocab_size=80,
        dim=64,
        num_layers=2,
        heads=2,
        pattern=("mac",),
        window=16,
        segment=16,
        persistent=4,
        memory={"heads": 2},  # type: ignore[arg-type]  # changes some fields of the default
    )
    return TrainConfig(
        model=model,
        data=RecallData(length=64, pairs=8),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.01, schedule="constant"),
        steps=700,
        batch=32,
    )
