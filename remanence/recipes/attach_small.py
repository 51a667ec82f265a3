"""The recipe `attach` for a GPU of 12 GB: steps of 8 x 1,024 tokens instead of 32 x 1,024, rows of up to 8K
tokens.

remanence attach BASE out/attached --window 512
remanence data prepare books/ --tokenizer out/attached/tokenizer.json --out out/tokens
remanence train attach_small --init_from=out/attached --data.path=out/tokens --out out/attach

Activations are recomputed in the backward pass. The estimate for SmolLM2-135M is 8.9 GB (--dry-run). This
variant was not evaluated; `attach` was: docs/results/attach.md.
"""

from dataclasses import replace
from pathlib import Path

from remanence.recipes import load_recipe
from remanence.train import FactDialoguesData, TrainConfig


def recipe() -> TrainConfig:
    """Return the config of the run."""
    large = load_recipe(Path(__file__).with_name("attach.py"))
    assert isinstance(large.data, FactDialoguesData)
    data = replace(large.data, curriculum=(1024, 1024, 1024, 2048, 4096, 8192))
    return replace(large, data=data, batch=8, checkpointing=True)
