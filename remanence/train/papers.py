"""What the Titans papers train: pre-training by size, and forecasting."""

from __future__ import annotations

from typing import Any

from remanence.config import ModelConfig, preset
from remanence.series.config import ForecastConfig
from remanence.train.config import DataConfig, OptimizerConfig, TrainConfig

LENGTH, ROWS = 4096, 128
"""Tokens of a row, and rows of a step: half a million tokens together."""


def pretraining(
    size: str, lr: float, billions: int, *, variant: str = "mac", accumulate: int = 4
) -> TrainConfig:
    """FineWeb-Edu, the Llama-2 tokenizer's 32,000 tokens, AdamW with a cosine, weight decay 0.1, rows of 4,096 tokens.

    The peak learning rate is from the NeurIPS version's table; its text and v1 have 4e-4 for every size. The papers do
    not give the warm-up, the betas and the clipping.
    """
    return TrainConfig(
        model=preset(size, variant, vocabulary=32_000),
        data=DataConfig(kind="packed", length=LENGTH),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.1, schedule="cosine", warmup=1000, final=0.1),
        steps=billions * 10**9 // (ROWS * LENGTH),
        batch=ROWS,
        accumulate=accumulate,
        precision="bfloat16",
        checkpointing=True,
        compile=True,
        save_every=500,
    )


def forecasting(
    split: str, *, lookback: int = 96, horizon: int = 96, steps: int = 600, **forecast: Any
) -> TrainConfig:
    """Titans' Table 3: the neural memory (LMM) as the mixer of a forecasting network, here over patches of 16 values.

    The paper says no more than that it takes Mamba's place in Simba. All sizes are ours: docs/results/forecast.md says
    what was measured. Stopped early by the validation part, as in the field.
    """
    model = ModelConfig(
        vocabulary=1,
        dim=64,
        depth=1,
        heads=4,
        pattern=("lmm",),
        ffn=128,
        window=64,
        segment=64,
        persistent=0,
        memory={"heads": 4, "chunk": 16},  # type: ignore[arg-type]  # fields of the default, changed
    )
    return TrainConfig(
        model=model,
        data=DataConfig(kind="forecast", length=lookback, horizon=horizon, split=split),
        forecast=ForecastConfig(**forecast),
        optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, warmup=30, final=0.05),
        steps=steps,
        batch=64,
        validate_every=max(1, steps // 12),
        stop_after=4,
        save_every=100,
    )
