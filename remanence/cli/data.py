"""The command that prepares training data, or verifies prepared data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from remanence.cli.progress import Progress
from remanence.cli.train import warn_if_binary
from remanence.runtime.terminal import echo


@dataclass(frozen=True)
class Data:
    """Tokenize texts (plain text, jsonl, parquet, folders, Hugging Face datasets) into token shards, or verify shards.

    An interrupted command continues when it is started again.
    """

    action: tyro.conf.Positional[Literal["prepare", "verify"]]
    """prepare: tokenize sources. verify: check the digests of prepared folders."""
    sources: tyro.conf.Positional[tuple[str, ...]]
    """For prepare: files and folders (also .xz .gz .bz2 .zst), and datasets as
    hf:NAME[@REVISION][:CONFIG[:SPLIT]], which are streamed (extra `data`). For verify: prepared folders.
    """
    out: Path | None = None
    """Folder for the shards."""
    tokenizer: Path | None = None
    """A tokenizer.json, .tiktoken or SentencePiece .model, or a model's name on Hugging Face's hub (extra `hf`).
    Default: bytes.
    """
    field: str = "text"
    """Name of the field or column that has the text."""
    workers: int = 1
    """Number of processes. The shards do not depend on it."""
    max_tokens: int | None = None
    """Use only the first documents, up to this many tokens in all, including end-of-text tokens."""
    max_documents: int | None = None
    """Use only this many documents, from the first on."""
    overwrite: bool = False
    """Replace the shards in --out if they were made from other sources, or with another tokenizer or field."""

    def run(self) -> None:
        if self.action == "verify":
            self._verify()
        else:
            self._prepare()

    def _verify(self) -> None:
        """Check the digests of prepared folders."""
        from remanence.data import Tokens

        if not self.sources:
            raise ValueError("sources: expected a folder made by `remanence data prepare`, got none")
        with Progress(every=30) as progress:
            bar = progress.add("verifying")
            for folder in self.sources:
                data = Tokens(folder)
                bar.begin(f"verifying {folder}", int(data.lengths.sum()))
                data.verify(lambda read, total: bar.update(read, f"{read:,} of {total:,} tokens"))
                counts = f"{data.lengths.sum():,} tokens in {len(data):,} documents"
                how = f"as prepared, digest {data.digest}" if data.digest else "in order; it has no digests"
                echo(f"{folder}: {counts}, {how}")

    def _prepare(self) -> None:
        """Tokenize the sources into shards."""
        from remanence.data import prepare

        if not self.sources:
            raise ValueError("sources: expected at least one file or folder, or hf:NAME, got none")
        if self.out is None:
            raise ValueError("--out: expected a folder for the shards, got none")
        warn_if_binary(self.sources)
        with Progress(every=30) as progress:
            bar = progress.add("preparing")

            def show(finished: int, total: int, tokens: int) -> None:
                """Update the progress bar: by tokens if --max-tokens limits them, otherwise by files."""
                note = f"{tokens:,} tokens, {finished:,} of {total:,} files"
                if self.max_tokens is None:
                    bar.update(finished, note, total=total)
                else:
                    bar.update(tokens, note, total=self.max_tokens)

            counts = prepare(
                self.sources,
                self.out,
                tokenizer=self.tokenizer,
                field=self.field,
                workers=self.workers,
                max_tokens=self.max_tokens,
                max_documents=self.max_documents,
                overwrite=self.overwrite,
                done=show,
            )
        skipped = f"; {counts['nulls']:,} without a text skipped" if counts["nulls"] else ""
        texts = f"{counts['documents']:,} documents from {counts['files']:,} files"
        echo(f"{self.out}: {counts['tokens']:,} tokens in {texts}{skipped}")
