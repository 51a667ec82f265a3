"""A small language model on books, as bytes, each book read in order with its memory carried from piece to piece.

remanence data prepare FOLDER-OF-BOOKS --out out/books --workers 2
remanence train books_small --out out/books-run --data.path=out/books
"""

from remanence.config import preset
from remanence.train import DocumentsData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        model=preset("small", "mac", num_layers=4),
        data=DocumentsData(length=512),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100),
        steps=5000,
        batch=8,
        carry=True,
    )
