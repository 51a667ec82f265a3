"""The model card of an exported folder: the architecture, the training data and how to use the model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import remanence
from remanence.io.files import replacing
from remanence.model import Model
from remanence.runtime.terminal import escape_controls
from remanence.tokenizers.tokens import load_tokenizer
from remanence.train.data_config import DataConfig, RecallData

CARD = """---
library_name: remanence
pipeline_tag: {pipeline}
tags:
- remanence
- neural-memory
---
# {name}

{facts} Trained with remanence {version} on {tokens:,} tokens in {steps:,} steps (data: {data}).

## Use

{use}
## To be added by whoever shares it

- What the training data is, and under which licence the weights are given.
- What it was measured on: `{measure}`.
- A memory file made with this model can reveal what was read.
"""

READ = """    remanence read {name} {file} --save {stem}.mem
    remanence generate {name} --memory-file {stem}.mem --prompt "{prompt}"

In Python:

    from remanence import Session

    session = Session("{name}")
    session.read("{text}")
    print(session.generate("{prompt}", max_tokens=64))

"""
SYMBOLS = """The model was trained on generated symbols and has no tokenizer: it cannot read text. It is measured on its
task:

    remanence eval {name} recall {settings}

In Python it takes numbers from 0 to {last}:

    import torch
    from remanence import Model

    model = Model.load("{name}")
    logits, state = model(torch.randint({vocabulary}, (1, 64)))

"""
HUGGING_FACE = """With Hugging Face (`pip install 'remanence[hf]'`):

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("{name}")

"""
WITHOUT_TOKENIZER = """With Hugging Face (`pip install 'remanence[hf]'`; tokens are bytes):

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)

"""
TEXT = {"file": "book.txt", "stem": "book", "prompt": "And then", "text": "A text of any length."}
"""The example text in a model card, unless the tokenizer has its own `example`."""


def write_card(model: Any, folder: Path, name: str, trained: Mapping[str, object], data: DataConfig) -> None:
    """Write the model card ``README.md`` to the folder of a model. `name` is the final name of the folder.

    `trained` is the training record. `data` is the config of the training data, which decides the example
    commands. A model that is not a `Model` describes itself by a method `card_parts`.
    """
    name = escape_controls(name, allowed="")
    count = sum(parameter.numel() for parameter in model.parameters())
    own = getattr(model, "card_parts", None)
    parts = _of_model(model, folder, name, data) if own is None else own(name)
    text = CARD.format(
        name=name,
        pipeline=parts["pipeline"],
        facts=f"{count:,} parameters: {parts['facts']}",
        use=parts["use"],
        measure=parts["measure"],
        version=remanence.__version__,
        tokens=trained["tokens"],
        steps=trained["steps"],
        data=trained["data"],
    )
    with replacing(folder / "README.md") as temporary:
        temporary.write_text(text, encoding="utf-8")


def _of_model(model: Model, folder: Path, name: str, data: DataConfig) -> dict[str, str]:
    """Return the parts of the card that depend on the model: "pipeline", "facts", "measure" and "use"."""
    config, own = model.config, (folder / "tokenizer.json").is_file()
    runs = [(block, len(list(same))) for block, same in groupby(config.blocks)]
    pattern = ", ".join(f"{count} {block}" for block, count in runs)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    tokenizer = "tokenizer.json" if own else "no tokenizer"
    shape = f"depth {config.num_layers}, width {config.dim} ({pattern}), {dtype}, "
    parts = {
        "pipeline": "text-generation",
        "facts": f"{shape}a vocabulary of {config.vocab_size:,} ({tokenizer}).",
        "measure": f"remanence eval {name} lm --data=TEXT --full",
    }
    if not own and isinstance(data, RecallData):
        settings = f"--keys={data.keys} --noise={data.noise} --pairs={data.pairs} --capacities={data.pairs}"
        use = SYMBOLS.format(
            name=name, settings=settings, last=config.vocab_size - 1, vocabulary=config.vocab_size
        )
        return parts | {"use": use, "measure": f"remanence eval {name} recall {settings}"}
    about = getattr(load_tokenizer(folder), "example", TEXT) if own else TEXT
    if data.evaluation is not None:
        parts["measure"] = f"remanence eval {name} {data.evaluation}"
    return parts | {"use": (READ + (HUGGING_FACE if own else WITHOUT_TOKENIZER)).format(name=name, **about)}
