"""Train a small language model on the bytes of books.

Each book is read in order, with the memory carried from step to step.

remanence data prepare FOLDER-OF-BOOKS --out out/books --workers 2
remanence train books_small --out out/books-run --data.path=out/books
"""

from remanence.config import preset
from remanence.train import DocumentsData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    return TrainConfig(
        model=preset("small", "mac", num_layers=4),
        data=DocumentsData(length=512),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100),
        steps=5000,
        batch=8,
        carry=True,
    )
