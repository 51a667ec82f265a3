"""What the training tests share: a small run's config, and what a finished run says."""

import json

from remanence import Model, ModelConfig
from remanence.train import DataConfig, OptimizerConfig, TrainConfig

MODEL = {
    "vocab_size": 257,
    "dim": 16,
    "num_layers": 1,
    "heads": 2,
    "window": 8,
    "segment": 8,
    "persistent": 2,
}


def config(variant="lmm", **fields):
    model = ModelConfig(**MODEL, pattern=(variant,), memory={"heads": 2, "chunk": 4, "expansion": 1.0})
    own = {
        "data": DataConfig(kind="recall", length=24, pairs=4),
        "steps": 12,
        "batch": 4,
        "save_every": 3,
        "log_every": 1,
    }
    return TrainConfig(
        **{**own, "model": model, "optimizer": OptimizerConfig(lr=1e-2, warmup=3), "device": "cpu", **fields}
    )


def losses(run):
    return {
        line["step"]: line["loss"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    }


def weights(run):
    return Model.load(run / "model").state_dict()
