"""A small reader of books that keeps facts: bytes, windows of 128 tokens and memories in turn, 5.8M parameters.

remanence data prepare books/ --out out/books
remanence train facts --data.path=out/books --out out/facts
remanence eval out/facts/model niah --niah.data=other-book.txt --niah.kinds=n --niah.lengths=4K,64K --memory on off

Facts are stated between the sentences of the books and asked for later, up to two million tokens later: a step reads
4,096 tokens of each row, and the memory is carried from step to step. The forget gates begin almost shut, since a
memory that lets go of a millionth with every token is empty after some million.
"""

from remanence.config import preset
from remanence.train import DataConfig, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    memory = {"head_dim": 128, "forget_bias": -14.0}
    return TrainConfig(
        model=preset("small", ("window", "lmm"), window=128, ffn=768, memory=memory),
        data=DataConfig(kind="facts", length=4096, weight=0.02, ramp=700),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100, weight_decay=0.1),
        steps=2000,
        batch=16,
        carry=True,
        precision="bfloat16",
        save_every=1000,
    )
