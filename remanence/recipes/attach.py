"""A memory for a pretrained model, trained on facts that are told and asked for, and on texts.

remanence attach BASE out/attached --window 512
remanence data prepare books/ --tokenizer out/attached/tokenizer.json --out out/tokens
remanence train attach --init_from=out/attached --data.path=out/tokens --out out/attach

Facts first, near, and out of attention's sight: for the first half of the run attention sees 64 tokens, and rows are
conversations in which up to twenty facts are told and asked for, with a text in between that grows from next to nothing
(`ramp`). A new memory finds what it was told, but not once a book has been written over it, and then no gradient says
how to pass over the book: it learns to forget instead. Later attention has its own window, half of the rows read texts
on from step to step, their memory carried, and rows grow to 16K tokens. The pretrained model stays as it is.

What it did for SmolLM2-135M: docs/results/attach.md.
"""

from remanence.train import FactDialoguesData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        data=FactDialoguesData(
            length=1024,
            curriculum=(1024, 1024, 1024, 2048, 8192, 16384),
            pairs=20,
            share=0.5,
            weight=0.02,
            ramp=270,
        ),
        optimizer=OptimizerConfig(lr=1e-3, warmup=20, weight_decay=0.0, schedule="wsd", decay=0.3),
        windows=(64,),
        steps=540,
        batch=32,
        carry=True,
        precision="bfloat16",
        save_every=180,
    )
