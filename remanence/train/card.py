"""The model card of an exported folder: what is known of the model, and how it is used."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import remanence
from remanence.io.files import replacing
from remanence.model import Model
from remanence.runtime.terminal import shown
from remanence.series.network import Network
from remanence.tokenizers.dna import DnaTokenizer
from remanence.tokenizers.tokens import load_tokenizer
from remanence.train.config import DataConfig

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
    remanence generate {name} --memory {stem}.mem --prompt "{prompt}"

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
FORECAST = """    remanence eval {name} forecast --forecast.data=series.csv

In Python:

    from remanence.forecast import Forecaster

    forecaster = Forecaster.load("{name}")
    print(forecaster.predict("series.csv"))

A file has the columns {channels}, and at least {lookback:,} rows.

"""


def write_card(
    model: Model | Network, folder: Path, name: str, trained: dict[str, Any], data: DataConfig
) -> None:
    """Write ``README.md`` to a model's folder, which is to have this name. `data` is what it was trained on: its
    commands run as they are written, on files of that kind.
    """
    name = shown(name, keep="")
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = _of_network(model, name) if isinstance(model, Network) else _of_model(model, folder, name, data)
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


def _of_network(network: Network, name: str) -> dict[str, str]:
    config = network.config
    channels = ", ".join(f"`{shown(each, keep='')}`" for each in config.names)
    use = FORECAST.format(name=name, channels=channels, lookback=config.lookback)
    return {
        "pipeline": "time-series-forecasting",
        "facts": f"a forecast of {config.horizon:,} rows from {config.lookback:,}.",
        "use": use,
        "measure": f"remanence eval {name} forecast --forecast.data=FILE.csv",
    }


def _of_model(model: Model, folder: Path, name: str, data: DataConfig) -> dict[str, str]:
    config, own = model.config, (folder / "tokenizer.json").is_file()
    runs = [(block, len(list(same))) for block, same in groupby(config.blocks)]
    pattern = ", ".join(f"{count} {block}" for block, count in runs)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    tokenizer = "tokenizer.json" if own else "no tokenizer"
    shape = f"depth {config.depth}, width {config.dim} ({pattern}), {dtype}, "
    parts = {
        "pipeline": "text-generation",
        "facts": f"{shape}a vocabulary of {config.vocabulary:,} ({tokenizer}).",
        "measure": f"remanence eval {name} lm --data=TEXT --full",
    }
    if not own and data.kind == "recall":
        settings = f"--keys={data.keys} --noise={data.noise} --pairs={data.pairs} --capacities={data.pairs}"
        use = SYMBOLS.format(
            name=name, settings=settings, last=config.vocabulary - 1, vocabulary=config.vocabulary
        )
        return parts | {"use": use, "measure": f"remanence eval {name} recall {settings}"}
    bases = own and isinstance(load_tokenizer(folder), DnaTokenizer)
    about = {"file": "bases.txt", "stem": "bases", "prompt": "ATG", "text": "ACGT" * 8} if bases else {
        "file": "book.txt", "stem": "book", "prompt": "And then", "text": "A text of any length."
    }  # fmt: skip
    if data.kind == "dna":
        parts["measure"] = f"remanence eval {name} dna --dna.data=FOLDER"
    return parts | {"use": (READ + (HUGGING_FACE if own else WITHOUT_TOKENIZER)).format(name=name, **about)}
