"""The commands that train a model and export it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from remanence.cli.arguments import Folder, errors_name_option
from remanence.cli.progress import Progress
from remanence.recipes import NAMES
from remanence.runtime.terminal import echo

if TYPE_CHECKING:
    from remanence.train import TrainConfig

PACKAGED = f"One of {', '.join(NAMES)}"
"""List of the packaged recipes, for help."""
RECIPE = f"{PACKAGED}, or a Python file with a function recipe() that returns a TrainConfig."
"""Help text of the argument RECIPE."""


@dataclass(frozen=True)
class Train:
    """Train a model from a recipe, in a new folder or, with --resume, from the last checkpoint of a run.

    --field=value changes a field of the recipe's configuration. The fields are listed below with their default
    values, which the recipe may change.
    """

    OPTIONS: ClassVar = ("text", "out", "resume", "dry-run", "gpus", "gpu", "help")
    OVERRIDES_OF: ClassVar = "the configuration"

    recipe: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE", help=RECIPE)] = Path("text")
    text: str | None = None
    """Text to train on: a file, a folder or hf:NAME. The same as --data.path with the recipe `text`."""
    out: Path | None = None
    """Folder of the run."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint."""
    dry_run: bool = False
    """Print the estimated cost (parameters, memory, tokens, hours) and stop. It is an error if the run does
    not fit.
    """
    gpus: int | None = None
    """For --dry-run: number of GPUs to plan for, instead of this machine."""
    gpu: str = "H100"
    """For --dry-run: type of GPU."""
    overrides: tyro.conf.Suppress[tuple[tuple[str, str], ...]] = ()

    @staticmethod
    def list_fields() -> Iterator[str]:
        """The lines of --help that list the fields of the configuration."""
        from remanence.cli.fields import all_fields, format_fields
        from remanence.train import DATA_KINDS, DataConfig, TrainConfig

        yield "configuration fields:"
        shared = {f"data.{name}" for name in DataConfig.field_names()}
        everywhere = all_fields(TrainConfig())
        yield from format_fields(
            each for each in everywhere if not each.name.startswith("data.") or each.name in shared
        )
        for kind, data in DATA_KINDS.items():
            yield f"fields with --data.kind={kind}:"
            yield from format_fields(each for each in all_fields(data(), "data.") if each.name not in shared)

    def run(self) -> None:
        overrides = dict(self.overrides)
        if self.text is not None:
            if self.recipe != Path("text"):
                raise ValueError(f"--text: expected the recipe text, or none, got {self.recipe}")
            overrides["data.path"] = self.text
        with errors_name_option("data.path", "--text") if self.text is not None else nullcontext():
            if self.dry_run:
                print_plan(self.recipe, overrides, self.gpus, self.gpu)
            elif self.out is None:
                raise ValueError("--out: expected a folder for the run, got none")
            else:
                train(self.recipe, self.out, overrides, self.resume)


@dataclass(frozen=True)
class Export:
    """Export the model of a training run as a folder for remanence and Hugging Face."""

    run_folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    out: Folder
    """Folder to create."""
    memory_file: Path | None = None
    """Memory file to write: the memory of one batch row at the end of a run with --carry=true."""
    row: int = 0
    """Batch row for --memory-file."""

    def run(self) -> None:
        from remanence.train import export
        from remanence.verticals import model_loader

        with (
            errors_name_option("out", "run")
            if not (self.run_folder / "config.json").is_file()
            else nullcontext()
        ):
            checkpoint = export(self.run_folder, self.out, self.memory_file, self.row)
        others = "" if model_loader(self.out) else " and Hugging Face"
        echo(f"{self.out}: the model of {checkpoint}, for remanence{others}")
        if self.memory_file is not None:
            echo(f"{self.memory_file}: what row {self.row} remembered")


def train(recipe: Path, out: Path, overrides: dict[str, str], resume: bool) -> None:
    """Train from a recipe and show progress. If several processes train together, only rank 0 prints."""
    from remanence.train import TextData, fit, run_config
    from remanence.train.text import choose_threads

    if resume and overrides:
        name = next(iter(overrides))
        raise ValueError(f"--{name}: expected no changes beside --resume, as the run's own config counts")
    config = run_config(out) if resume else load_config(recipe, overrides)
    if config.data.kind == "text" and (resume or "steps" in overrides):  # else `fit_time_budget` does it
        choose_threads(config)
    first = os.environ.get("RANK", "0") == "0"  # torchrun sets RANK if it started several processes
    with Progress(steps=True, every=0, visible=first) as progress:
        bar = progress.add("training", config.steps)
        logged = 0

        def show(line: dict[str, Any]) -> None:
            nonlocal logged
            if not logged:  # a resumed run does not begin at step 0
                bar.first = max(0, line["step"] - config.log_every)
            logged = line["step"]
            bar.update(logged, _describe(line))

        try:
            model = fit(None if resume else config, out, resume=resume, log=show)
        except KeyboardInterrupt:
            if (out / "checkpoints").is_dir() and first:
                echo(f"{out}: --resume continues from the last checkpoint", error=True)
            raise
    if not first:
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if (out / "model" / "config.json").is_file():
        echo(f"{out}: {count:,} parameters, see metrics.jsonl; the model is in {out / 'model'}")
        if isinstance(config.data, TextData):
            measure_held_out(out, config.data.path)
    else:
        last = sorted((out / "checkpoints").glob("[0-9]*"))[-1]
        echo(f"{out}: stopped and saved after step {int(last.name)}; --resume continues")


def load_config(recipe: Path, overrides: dict[str, str]) -> TrainConfig:
    """Return the config of a recipe with fields changed. For a recipe that trains on a text, the number of
    steps is chosen by the speed of this machine, unless it is given.
    """
    from remanence.recipes import load_recipe
    from remanence.train import TextData, override, resolve_config
    from remanence.train.text import fit_time_budget

    config = resolve_config(override(load_recipe(recipe), overrides))
    if not isinstance(config.data, TextData):
        return config
    if config.data.path is not None:
        warn_if_binary([config.data.path])
    return config if "steps" in overrides else fit_time_budget(config)


def warn_if_binary(sources: Sequence[str]) -> None:
    """Print a warning about local files that do not look like text. Missing files are ignored here and
    reported elsewhere.
    """
    from remanence.data.sources import binary_warning, files

    here = [Path(source) for source in sources if Path(source).exists()]
    for path in files(here):
        if warning := binary_warning(path):
            echo(warning, error=True)


def measure_held_out(out: Path, path: str | None) -> None:
    """Measure and print the bits per byte of the model on the held-out end of its text, compared with xz, and
    write them to held-out.json in the run's folder.
    """
    from remanence.data.own import read_text
    from remanence.io.files import write_json
    from remanence.model import Model
    from remanence.tokenizers.tokens import load_tokenizer
    from remanence.train.text import held_out

    folder = out / "model"
    found = held_out(Model.load(folder).eval(), load_tokenizer(folder), read_text("data.path", path))
    write_json(out / "held-out.json", found._asdict())
    xz = f"xz -9 {found.xz_after:.3f} after the text before it, {found.xz_alone:.3f} alone"
    echo(f"held out: {found.model:.3f} bits per byte of the last {found.bytes:,} bytes; {xz}")


def _describe(line: dict[str, Any]) -> str:
    """Return the metrics of a logged step in one line of text."""
    words = ["loss none" if line["loss"] is None else f"loss {line['loss']:.4f}"]
    words += [f"validation {line['validation']:.4f}"] if line.get("validation") is not None else []
    words += [f"{line['tokens_per_s']:,.0f} tokens/s"]
    words += [f"MFU {line['mfu']:.1%}"] if line.get("mfu") is not None else []
    words += [f"{line['memory_gib']:.1f} GiB"]
    words += [f"surprise {line['surprise']:.3f}"] if line.get("surprise") is not None else []
    words += [f"step size {line['step_size']:.4f}"] if line.get("step_size") is not None else []
    words += [f"keep {line['keep']:.5f}"] if line.get("keep") is not None else []
    words += [f"{line['skipped']} skipped"] if line["skipped"] else []
    words += [f"{line['clamped']} clamped"] if line["clamped"] else []
    return ", ".join(words)


def print_plan(recipe: Path, overrides: dict[str, str], gpus: int | None, gpu: str) -> None:
    """Print the estimated cost of a run. Raises an error if the run does not fit into memory."""
    from rich.table import Table

    from remanence.cli.console import Console
    from remanence.runtime.choices import check_choice
    from remanence.train import SOURCES
    from remanence.train.metrics import check_trackers
    from remanence.train.plan import plan

    config = load_config(recipe, overrides)
    check_choice("data.kind", config.data.kind, SOURCES)
    check_trackers(config.trackers)
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus: expected at least 1, got {gpus}")
    costs = plan(config, gpus, gpu)
    table = Table(title=f"{recipe.name}: what it would cost (estimates)", show_header=False)
    table.add_row("parameters", f"{costs.parameters:,}")
    table.add_row("blocks", " ".join(config.model.pattern) + f", {config.model.num_layers} layers")
    step = config.batch * config.data.length
    table.add_row("tokens", f"{costs.tokens:,} in {config.steps:,} steps of {step:,}")
    table.add_row("operations", f"{costs.flops:.2e}, forward and backward")
    for part, size in costs.memory.items():
        table.add_row(f"memory: {part}", f"{size / 1e9:.2f} GB")
    table.add_row("memory of a device", f"{costs.needed / 1e9:.2f} GB of {costs.available / 1e9:.0f}")
    table.add_row("tokens per second", f"{costs.rate:,.0f} ({costs.basis})")
    table.add_row("hours", f"{costs.hours:,.2f}")
    Console().print(table)
