"""Pretraining of a small LMM on a genome, one token per base. `dna/classify` starts from it, as in HyenaDNA.

remanence train dna/pretrain --out out/genome --data.path=genome.fna.gz
remanence eval out/genome/model lm --lm.data=held-out.fna --lm.views=stream --full --memory-mode on off
"""

from remanence.config import ModelConfig
from remanence.dna.alphabet import VOCABULARY
from remanence.dna.config import GenomeData
from remanence.train import OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    model = ModelConfig(
        vocab_size=VOCABULARY,
        dim=256,
        num_layers=4,
        heads=4,
        pattern=("lmm",),
        window=128,
        segment=128,
        persistent=16,
        memory={"head_dim": 64},  # type: ignore[arg-type]  # changed fields of the default
    )
    return TrainConfig(
        model=model,
        data=GenomeData(length=1024, reverse_complement=True),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100),
        steps=3000,
        batch=32,
        carry=True,
        prompt="ATG",
    )
