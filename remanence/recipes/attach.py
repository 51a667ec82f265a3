"""A memory for a pretrained model, trained on texts and on facts that are told and asked for.

remanence attach BASE out/attached --window 512
remanence data prepare books/ --tokenizer out/attached/tokenizer.json --out out/tokens
remanence train attach --init_from=out/attached --data.path=out/tokens --out out/attach

Half of the rows are conversations: up to twenty facts are told, something else is read until attention has lost sight
of them, and every one is asked for. The others read texts on from step to step, their memory carried. Rows grow from 2K
to 16K tokens. The pretrained model stays as it is. `--windows=2048,1024` narrows attention step by step.

What it did for SmolLM2-135M, and what it did not: docs/results/attach.md.
"""

from remanence.train import DataConfig, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        data=DataConfig(
            kind="told",
            length=2048,
            curriculum=(2048, 2048, 2048, 2048, 4096, 8192, 16384),
            pairs=20,
            share=0.5,
        ),
        optimizer=OptimizerConfig(lr=3e-3, warmup=40, weight_decay=0.1, schedule="wsd", decay=0.3),
        steps=700,
        batch=32,
        carry=True,
        precision="bfloat16",
        save_every=100,
    )
