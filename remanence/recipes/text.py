"""A text of your own, from `remanence-small`: English books in bytes, 6.0M parameters.

remanence train --text book.txt --out my-run                  # a file, a folder, or hf:NAME
remanence generate my-run/model --prompt "And then"

The end of the text is held out, and the run ends with its bits per byte beside those of `xz -9`. It takes as many steps
as this machine does in a few minutes (`train/text.py: sized`); --steps=N takes another number. A model that begins with
nothing has read far too little after ten minutes of a CPU: docs/training.md.
"""

from remanence.train import DataConfig, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        init_from="remanence-small",
        data=DataConfig(kind="text", length=512),
        optimizer=OptimizerConfig(lr=5e-4, warmup=20, final=0.05),
        steps=200,
        batch=4,
        carry=True,
    )
