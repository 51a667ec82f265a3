"""The command that attaches a memory to a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from remanence.cli.arguments import Folder
from remanence.runtime.terminal import echo


@dataclass(frozen=True)
class Attach:
    """Add a memory to a pretrained Hugging Face model, and write a folder with the new weights and the configuration.

    The output of the new memory is zero until it is trained: `remanence train attach --init_from=OUT` trains
    it. Requires the extra `hf`.
    """

    base: tyro.conf.Positional[str]
    """Folder, name or GGUF file of a causal language model."""
    out: Folder
    """Folder to create."""
    kind: Literal["neural", "knn"] = "neural"
    """Type of memory: neural, or knn, a store of past keys and values in one layer."""
    place: Literal["beside", "front"] = "beside"
    """Position of a neural memory: beside attention (MAG) or in front of it (MAL)."""
    every: int | None = None
    """Distance between layers with a memory. None: 8."""
    window: int | None = 512
    """Sliding window of attention, in tokens. None: full attention, as in the pretrained model."""
    sinks: int = 4
    """Number of attention sinks: first tokens of a text that windowed attention always sees."""
    attention: str | None = None
    """Name of the attention modules, for models without an adapter."""
    lora: int = 0
    """Rank of LoRA adapters on the attention projections (extra `lora`). 0: none."""
    seed: int = 0
    """Random seed of the new weights."""

    def run(self) -> None:
        import torch

        from remanence.attached.base import PretrainedSource
        from remanence.attached.folder import check_unattached, is_attached
        from remanence.io.files import replacing_folder

        out = self.out
        if is_attached(out):
            hint = (
                f"`remanence train attach --init_from={out}` trains it; to attach anew, give another folder"
            )
            raise ValueError(f"out: expected a new or empty folder, got {out}, an attached model; {hint}")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(
                f"out: expected a new or empty folder, got {out}; existing files are not overwritten"
            )
        check_unattached(self.base)
        from remanence.hf import attach  # slow to import

        torch.manual_seed(self.seed)
        model = attach(
            self.base, kind=self.kind, place=self.place, every=self.every, window=self.window, sinks=self.sinks,
            attention=self.attention, lora=self.lora,
        )  # fmt: skip
        tokenizer = PretrainedSource.from_path(self.base).load_tokenizer()
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
