"""Train on your own text, starting from `remanence-small` (trained on the bytes of English books, 6.0M
parameters).

remanence train --text book.txt --out my-run                  # a file, a folder, or hf:NAME
remanence generate my-run/model --prompt "And then"
remanence train --text book.txt --out my-run --init_from=none --batch=8 --optimizer.lr=3e-3     # from scratch

The end of the text is held out. After the run, the bits per byte of the model on that part are printed next
to those of `xz -9`. By default the run takes as many steps as this machine can do in six minutes
(`train/text.py: fit_time_budget`); --steps=N sets the number of steps. With --init_from=none, the model is an
LMM of 1.6M parameters that is trained from scratch. This is the fairer comparison with xz, which has no
knowledge of English either. Results of both are in docs/training.md.
"""

from remanence.config import preset
from remanence.train import OptimizerConfig, TextData, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    return TrainConfig(
        init_from="remanence-small",
        model=preset("tiny", "lmm", dim=192, num_layers=3, memory={"head_dim": 64}),
        data=TextData(length=512),
        optimizer=OptimizerConfig(lr=1e-3, warmup=20, final=0.02),
        steps=200,
        batch=4,
        carry=True,
    )
