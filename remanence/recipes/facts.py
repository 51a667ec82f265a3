"""Train a small model that reads books and remembers facts: bytes, MAG with windows of 128 tokens, 6.0M
parameters.

remanence data prepare books/ --out out/books
remanence train facts --data.path=out/books --out out/facts
remanence eval out/facts/model niah --niah.data=other-book.txt --niah.kinds=n --niah.lengths=4K,64K --memory-mode on off

Facts are stated between the sentences of the books and asked for up to half a million tokens later: numbers,
words and names, in many wordings (`data.facts`). A step reads 2,048 tokens of each row, and the memory is
carried from step to step. Writing has a cost (`write_cost`), and gates below a threshold are closed: a memory
that wrote even a ten-thousandth of every token would overwrite everything within a million tokens. The first
layer is windowed attention with a convolution and no memory, because gates in the first layer would see single
bytes without context and write every digit of a book. The texts contain numbers that belong to no fact, so that
gates learn to ignore them. Keys are initialized to the query of the previous token (`induction`), and
convolutions are long enough to cover a name: with random initialization, models learned to recall a fact but
not to look at its name. The window is short on purpose: with 256 tokens, models learned to look up facts in the
window instead of the memory.

The model `remanence-small` was trained with an earlier version of this recipe, with `data.facts=numbers`,
`data.weight=0.01` and `data.answer_end=false`: docs/results/facts.md.
"""

from remanence.config import preset
from remanence.runtime.keywords import MemoryFields
from remanence.train import FactsData, OptimizerConfig, TrainConfig


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
        model=preset("small", ("conv_window", *["mag"] * 5), window=128, ffn=416, memory=memory),
        data=FactsData(length=2048, weight=0.02, distance_ramp=2100, facts="broad"),
        optimizer=OptimizerConfig(lr=2e-3, warmup=100, weight_decay=0.1, schedule="wsd"),
        steps=3000,
        batch=16,
        carry=True,
        write_cost=0.3,
        precision="bfloat16",
        save_every=1000,
    )
