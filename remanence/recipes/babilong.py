"""BABILong by fine-tuning: bAbI's training stories hidden in books, with the answer at the end of each.

remanence train babilong --data.path=babi.tar.gz --data.books=books/ --init_from=out/books-run/model --out out/babi-1k
remanence train babilong --data.path=babi.tar.gz --data.books=books/ --init_from=out/babi-1k/model --data.length=4096 \\
    --out out/babi-4k
remanence eval out/babi-4k/model babilong --babilong.data=babi.tar.gz --babilong.books=books/ \\
    --babilong.lengths=0,4K,16K

Longer rows after shorter ones, each from the model before. Without --init_from a small model begins with nothing, on
bytes.
"""

from remanence.config import preset
from remanence.train import DataConfig, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        model=preset("small", "mac", depth=4),
        data=DataConfig(kind="babilong", length=1024),
        optimizer=OptimizerConfig(lr=5e-4, warmup=100),
        steps=5000,
        batch=16,
    )
