"""BABILong by fine-tuning: bAbI's training stories, first alone, then hidden in ever longer stretches of books.

remanence train babilong --data.path=babi.tar.gz --data.books=books/ --init_from=out/books-run/model --out out/babi
remanence train babilong --data.path=babi.tar.gz --data.books=books/ --init_from=out/babi/model --out out/babi-64k \\
    --data.curriculum=4K,64K
remanence eval out/babi-64k/model babilong --babilong.data=babi.tar.gz --babilong.books=others/ \\
    --babilong.lengths=0,4K,64K,1M

Every step has 16 x 4,096 tokens, in rows from 256 tokens to 64K. Without --init_from a small model begins with nothing,
on bytes. The archive's folder en-10k has ten times as many stories; benchmarks/babilong.py uses it.
"""

from remanence.config import preset
from remanence.train import DataConfig, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        model=preset("small", "mac", depth=4),
        data=DataConfig(kind="babilong", length=4096, curriculum=(0, 0, 256, 1024, 4096)),
        optimizer=OptimizerConfig(lr=5e-4, warmup=100),
        steps=5000,
        batch=16,
    )
