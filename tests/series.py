"""What the forecasting tests share: a small series, a small network, a small run."""

import numpy as np
import torch

from remanence.config import ModelConfig
from remanence.forecast.config import ForecastConfig, NetworkConfig
from remanence.forecast.network import make_network
from remanence.train import DataConfig, OptimizerConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=1, dim=16, num_layers=1, heads=2, pattern=("lmm",), ffn=16, window=8, segment=8, persistent=0,
    memory={"heads": 2, "chunk": 4, "expansion": 1.0},
)  # fmt: skip


def waves(rows=400, noise=0.1, seed=0):
    """Two seasons and a trend of three channels."""
    t = np.arange(rows)
    values = np.stack([np.sin(t / 2), np.cos(t / 5) + 0.01 * t, np.sin(t / 3) ** 3], 1)
    return 5 + 3 * values + noise * np.random.default_rng(seed).standard_normal(values.shape)


def written(path, values, names=("a", "b", "c")):
    lines = [",".join(("date", *names))]
    lines += [",".join((f"2020-01-{row}", *map(repr, map(float, cells)))) for row, cells in enumerate(values)]
    path.write_text("\n".join(lines) + "\n")
    return path


def shape(lookback=24, horizon=8, names=("a", "b", "c"), **forecast):
    own = {"patch": 8, "stride": 4, **forecast}
    return NetworkConfig(
        forecast=ForecastConfig(**own), model=MODEL, lookback=lookback, horizon=horizon, names=names
    )


def network(seed=0, **fields):
    """With numbers of a size that a trained one has."""
    torch.manual_seed(seed)
    made = make_network(shape(**fields)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith(("head_proj", "season", "channel")):
                parameter.normal_(std=0.1)
    return made


def config(path=None, **fields):
    own = {"steps": 12, "batch": 8, "save_every": 3, "log_every": 1, "validate_every": 4, "device": "cpu"}
    data = DataConfig(kind="forecast", path=None if path is None else str(path), length=24, horizon=8)
    given = {
        "model": MODEL,
        "data": data,
        "forecast": ForecastConfig(patch=8, stride=4),
        "optimizer": OptimizerConfig(lr=1e-2, warmup=3),
    }
    return TrainConfig(**{**own, **given, **fields})
