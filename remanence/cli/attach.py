"""The command that attaches a memory to a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from remanence.cli.arguments import Folder
from remanence.runtime.terminal import echo


@dataclass(frozen=True)
class Attach:
    """Give a pretrained Hugging Face model a memory: a folder with what is new, its weights and its configuration.

    The memory's output is initialised to zero: `remanence train attach --init_from=OUT` trains it. Extra `hf`.
    """

    base: tyro.conf.Positional[str]
    """Folder, name or GGUF file of a causal language model."""
    out: Folder
    """New folder to write."""
    kind: Literal["neural", "knn"] = "neural"
    """A neural memory, or a store of past keys and values in one layer."""
    place: Literal["beside", "front"] = "beside"
    """Of a neural memory: beside attention (MAG) or in front of it (MAL)."""
    every: int | None = None
    """A memory in every so many layers. None: in every eighth."""
    window: int | None = 512
    """Tokens that attention is narrowed to. None: all, as the model was made; its state then grows with the text."""
    sinks: int = 4
    """The first tokens of a text, which a narrowed attention sees as well."""
    attention: str | None = None
    """What the attention modules are called, for models without an adapter."""
    lora: int = 0
    """The rank of trained changes to the attention's projections (extra `lora`). 0: none."""
    seed: int = 0
    """Of the new weights."""

    def run(self) -> None:
        import torch

        from remanence.attached.base import Source
        from remanence.attached.folder import check_unattached, is_attached
        from remanence.io.files import replacing_folder

        out = self.out
        if is_attached(out):
            hint = (
                f"`remanence train attach --init_from={out}` trains it; to attach anew, give another folder"
            )
            raise ValueError(f"out: expected a new or empty folder, got {out}, an attached model; {hint}")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out: expected a new or empty folder, got {out}; nothing is ever overwritten")
        check_unattached(self.base)
        from remanence.hf import attach  # slow to import

        torch.manual_seed(self.seed)
        model = attach(
            self.base, kind=self.kind, place=self.place, every=self.every, window=self.window, sinks=self.sinks,
            attention=self.attention, lora=self.lora,
        )  # fmt: skip
        tokenizer = Source.of(self.base).tokenizer()
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(out) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        new = sum(weight.numel() for _, weight in model.model.saved_parameters())
        all_of_it = sum(weight.numel() for weight in model.parameters())
        layers = ", ".join(str(layer) for layer in model.model.config.layers)
        echo(
            f"{out}: {new:,} new parameters of {all_of_it:,}, in layers {layers}; untrained, its output is zero"
        )
