"""The model card of an exported folder: what is known of the model, and how it is used."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import remanence
from remanence.core.files import replacing
from remanence.core.terminal import shown
from remanence.model import Model

CARD = """---
library_name: remanence
pipeline_tag: text-generation
tags:
- remanence
- neural-memory
---
# {name}

{parameters:,} parameters: depth {layers}, width {dim} ({pattern}), {dtype}, a vocabulary of {vocabulary:,}
({tokenizer}). Trained with remanence {version} on {tokens:,} tokens in {steps:,} steps (data: {data}).

## Use

    remanence read {name} book.txt --save book.mem
    remanence generate {name} --memory book.mem --prompt "And then"

In Python:

    from remanence import Session

    session = Session("{name}")
    session.read("A text of any length.")
    print(session.generate("And then", max_tokens=64))

With Hugging Face (`pip install 'remanence[hf]'`):

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("{name}")

## To be added by whoever shares it

- What the training texts are, and under which licence the weights are given.
- What it was measured on: `remanence eval {name} lm --data=TEXT`.
- A memory file made with this model can reveal what was read.
"""


def write_card(model: Model, folder: Path, name: str, trained: dict[str, Any]) -> None:
    """Write ``README.md`` to a model's folder, which is to have this name."""
    config, own = model.config, (folder / "tokenizer.json").is_file()
    runs = [(block, len(list(same))) for block, same in groupby(config.blocks)]
    text = CARD.format(
        name=shown(name, keep=""),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.depth,
        dim=config.dim,
        pattern=", ".join(f"{count} {block}" for block, count in runs),
        dtype=str(model.embed.weight.dtype).removeprefix("torch."),
        vocabulary=config.vocabulary,
        tokenizer="tokenizer.json" if own else "no tokenizer",
        version=remanence.__version__,
        tokens=trained["tokens"],
        steps=trained["steps"],
        data=trained["data"],
    )
    with replacing(folder / "README.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
