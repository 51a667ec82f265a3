"""Training runs of forecasting networks, one recipe for each dataset."""

from __future__ import annotations

from typing import Any

from remanence.config import ModelConfig
from remanence.forecast.config import ForecastConfig
from remanence.forecast.data_config import ForecastData
from remanence.train import OptimizerConfig, TrainConfig


def forecasting(
    split: str, *, lookback: int = 96, horizon: int = 96, steps: int = 600, **forecast: Any
) -> TrainConfig:
    """Titans' Table 3: the neural memory (LMM) as the mixer of a forecasting network, here over patches of 16 values.

    The paper says no more than that it takes Mamba's place in Simba. All sizes are ours: docs/results/forecast.md says
    what was measured. Stopped early by the validation part, as in the field.
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
        memory={"heads": 4, "chunk": 16},  # type: ignore[arg-type]  # fields of the default, changed
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
