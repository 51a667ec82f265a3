"""A text of your own, from `remanence-small`: English books in bytes, 6.0M parameters.

remanence train --text book.txt --out my-run                  # a file, a folder, or hf:NAME
remanence generate my-run/model --prompt "And then"
remanence train --text book.txt --out my-run --init_from=none --batch=8 --optimizer.lr=3e-3     # begun with nothing

The end of the text is held out, and the run ends with its bits per byte beside those of `xz -9`. It takes as many steps
as this machine does in six minutes (`train/text.py: fit_time_budget`); --steps=N takes another number. A model that
begins with nothing is an LMM of 1.6M parameters here: the fairer comparison with xz, which knows no English either.
Both are measured in docs/training.md.
"""

from remanence.config import preset
from remanence.train import OptimizerConfig, TextData, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        init_from="remanence-small",
        model=preset("tiny", "lmm", dim=192, num_layers=3, memory={"head_dim": 64}),
        data=TextData(length=512),
        optimizer=OptimizerConfig(lr=1e-3, warmup=20, final=0.02),
        steps=200,
        batch=4,
        carry=True,
    )
