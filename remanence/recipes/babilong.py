"""Train on BABILong: the training stories of bAbI, first alone, then hidden in longer and longer parts of
books.

remanence train babilong --data.path=babi.tar.gz --data.books=books/ --out out/babi
remanence train babilong --data.path=babi.tar.gz --data.books=books/ --init_from=out/babi/model --out out/babi-64k \\
    --data.curriculum=4K,64K
remanence eval out/babi-64k/model babilong --babilong.data=babi.tar.gz --babilong.books=others/ \\
    --babilong.lengths=0,4K,64K,1M

Every step has 16 x 4,096 tokens, in rows from 256 tokens to 16K. By default a small model on bytes is trained
from scratch; --init_from fine-tunes an existing model. With qa1 alone (--data.tasks=qa1), the model answered
100 of 100 questions in 128K bytes of books (docs/results/babilong.md). That result used the archive's folder
en-10k, which has ten times as many stories.
"""

from remanence.config import preset
from remanence.runtime.keywords import MemoryFields
from remanence.train import BabilongData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    memory: MemoryFields = {
        "head_dim": 128,
        "conv": 16,
        "induction": True,
        "forget_bias": -10.0,
        "threshold": 0.01,
    }
    return TrainConfig(
        model=preset(
            "small", ("conv_window", *["mag"] * 5), window=256, persistent=0, ffn=512, memory=memory
        ),
        data=BabilongData(
            length=4096,
            curriculum=(0, 0, 0, 256, 1024, 1024, 4096, 4096, 16384, 16384),
        ),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100, schedule="wsd"),
        steps=1500,
        batch=16,
        write_cost=0.1,
        precision="bfloat16",
    )
