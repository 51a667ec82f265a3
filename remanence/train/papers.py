"""Pre-training configurations of the Titans papers, by model size."""

from __future__ import annotations

from remanence.config import preset
from remanence.train.config import OptimizerConfig, TrainConfig
from remanence.train.data_config import PackedData
from remanence.verticals import moved_attribute

LENGTH, ROWS = 4096, 128
"""The number of tokens of a row and of rows of a step: half a million tokens per step."""


def pretraining(
    size: str, lr: float, billions: int, *, variant: str = "mac", accumulate: int = 4
) -> TrainConfig:
    """Return the pre-training config of the Titans papers for a model size and `billions` billion tokens.

    The setting is FineWeb-Edu, the Llama-2 tokenizer with 32,000 tokens, AdamW with a cosine schedule, weight
    decay 0.1 and rows of 4,096 tokens. The peak learning rates of the recipes are from the table of the
    NeurIPS version; its text and v1 give 4e-4 for every size. The papers do not give the warm-up, the betas
    and the gradient clipping.
    """
    return TrainConfig(
        model=preset(size, variant, vocab_size=32_000),
        data=PackedData(length=LENGTH),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.1, schedule="cosine", warmup=1000, final=0.1),
        steps=billions * 10**9 // (ROWS * LENGTH),
        batch=ROWS,
        accumulate=accumulate,
        precision="bfloat16",
        checkpointing=True,
        compile=True,
        save_every=500,
    )


def __getattr__(name: str) -> object:
    return moved_attribute(__name__, name)
