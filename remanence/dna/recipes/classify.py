"""Classification of DNA sequences, from a model pretrained on a genome (``--init_from``) or from scratch.

remanence train dna/classify --out out/promoters --data.path=GUE/prom/prom_300_tata --init_from=out/genome/model
remanence eval out/promoters/model dna --dna.data=GUE/prom/prom_300_tata --memory-mode on off --json out/promoters.json
"""

from dataclasses import replace
from pathlib import Path

from remanence.dna.config import DnaData
from remanence.recipes import load_recipe
from remanence.train import OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return replace(
        load_recipe(Path(__file__).with_name("pretrain.py")),
        data=DnaData(length=1024, weight=0.0, reverse_complement=True),
        optimizer=OptimizerConfig(lr=1e-3, warmup=100),
        steps=2000,
        batch=64,
        carry=False,
    )
