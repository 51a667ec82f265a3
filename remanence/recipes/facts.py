"""A small reader of books that keeps facts: bytes, MAG with windows of 128 tokens, 6.0M parameters.

remanence data prepare books/ --out out/books
remanence train facts --data.path=out/books --out out/facts
remanence eval out/facts/model niah --niah.data=other-book.txt --niah.kinds=n --niah.lengths=4K,64K --memory-mode on off

Facts are stated between the sentences of the books and asked for later, up to half a million tokens later: a step reads
2,048 tokens of each row, and the memory is carried from step to step. Writing costs something, and gates have a
threshold below which they are shut: a memory that writes a ten-thousandth of every token has written over everything
after a million. The first layer is a window with a convolution and no memory: gates in the first layer see a byte and
not what it belongs to, and would write every digit of a book; the texts have numbers that belong to no fact, so that
gates learn to pass over those. Keys begin as the query of the token before (`induction`), and convolutions are long
enough to hold a name: begun at random, models learned to recall a fact but not to look at its name. The window is short
on purpose: with one of 256 tokens, models learned to look facts up in the window, and not in the memory.

This made `remanence-small`: docs/results/facts.md.
"""

from remanence.config import preset
from remanence.runtime.keywords import MemoryFields
from remanence.train import FactsData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    memory: MemoryFields = {
        "head_dim": 128,
        "conv": 16,
        "induction": True,
        "forget_bias": -10.0,
        "threshold": 0.01,
    }
    return TrainConfig(
        model=preset("small", ("conv_window", *["mag"] * 5), window=128, ffn=416, memory=memory),
        data=FactsData(length=2048, weight=0.01, distance_ramp=2100),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100, weight_decay=0.1, schedule="wsd"),
        steps=3000,
        batch=16,
        carry=True,
        write_cost=0.3,
        precision="bfloat16",
        save_every=1000,
    )
