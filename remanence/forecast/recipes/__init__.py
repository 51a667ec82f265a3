"""Training recipes of forecasting networks, one for each dataset."""

from __future__ import annotations

from typing import Any

from remanence.config import ModelConfig
from remanence.forecast.config import ForecastConfig
from remanence.forecast.data_config import ForecastData
from remanence.train import OptimizerConfig, TrainConfig


def forecasting(
    split: str, *, lookback: int = 96, horizon: int = 96, steps: int = 600, **forecast: Any
) -> TrainConfig:
    """Return the training configuration of Table 3 in the Titans paper.

    The neural memory (LMM) is the mixer of a forecasting network, here over patches of 16 rows. The paper
    only says that the memory replaces Mamba in Simba, so all sizes are our choice; docs/results/forecast.md
    lists the measurements. Training stops early by the validation error, as is common. `forecast` are fields
    of `ForecastConfig`.
    """
    model = ModelConfig(
        vocab_size=1,
        dim=64,
        num_layers=1,
        heads=4,
        pattern=("lmm",),
        ffn=128,
        window=64,
        segment=64,
        persistent=0,
        memory={"heads": 4, "chunk": 16},  # type: ignore[arg-type]  # changed fields of the default
    )
    return TrainConfig(  # type: ignore[call-arg]
        model=model,
        data=ForecastData(length=lookback, horizon=horizon, split=split),
        forecast=ForecastConfig(**forecast),
        optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, warmup=30, final=0.05),
        steps=steps,
        batch=64,
        validate_every=max(1, steps // 12),
        stop_after=4,
        save_every=100,
    )
