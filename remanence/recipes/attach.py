"""Train a memory attached to a pretrained model, on conversations with facts and on texts.

remanence attach BASE out/attached --window 512
remanence data prepare books/ --tokenizer out/attached/tokenizer.json --out out/tokens
remanence train attach --init_from=out/attached --data.path=out/tokens --out out/attach

The first half of the run uses short distances and a short attention window: attention sees 64 tokens, and all
rows are conversations that state up to twenty facts, read a text and ask for the facts. The text between
facts and questions grows from 16 tokens (`distance_ramp`). If texts were long from the start, a new memory
would learn to forget: facts would be overwritten before they are asked for, and no gradient would show how to
keep them. In the second half, attention has the model's own window, half of the rows read texts with their
memory carried from step to step, and rows grow to 16K tokens. The weights of the pretrained model are frozen.

Results for SmolLM2-135M: docs/results/attach.md.
"""

from remanence.train import FactDialoguesData, OptimizerConfig, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    return TrainConfig(
        data=FactDialoguesData(
            length=1024,
            curriculum=(1024, 1024, 1024, 2048, 8192, 16384),
            pairs=20,
            share=0.5,
            weight=0.02,
            distance_ramp=270,
        ),
        optimizer=OptimizerConfig(lr=1e-3, warmup=20, weight_decay=0.0, schedule="wsd", decay=0.3),
        windows=(64,),
        steps=540,
        batch=32,
        carry=True,
        precision="bfloat16",
        save_every=180,
    )
