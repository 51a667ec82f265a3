"""The command line. It parses before torch is imported, so that --help and a wrong argument answer at once."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from remanence.inference.generate import Sampling

Device = Literal["auto", "cpu", "cuda", "mps"]
Write = Literal["all", "prompt", "none"]
Folder = tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Demo:
    """Train a sliding-window Transformer, an LMM and a MAC to recall pairs, in a minute or two, and ask them from afar.

    Prints and plots right answers against distance; then a memory is saved, restored in a fresh model, and asked.
    """

    out: Path = Path("out/demo")
    """Folder for the plot, the numbers, the trained models and the memory file. An earlier demo there is replaced."""
    device: Device = "cpu"
    """Where to run. README's figures are a CPU's."""
    seed: int = 1
    """Of the models and of the texts."""
    steps: int | None = None
    """Training steps of each model, for a quick look. Default: as many as each needs."""

    def run(self) -> None:
        from remanence.cli.demo import main

        main(self.out, self.device, self.seed, self.steps)


@dataclass(frozen=True)
class New:
    """Make an untrained model: a folder with its configuration, weights and tokenizer."""

    preset: tyro.conf.Positional[str]
    """tiny, small, 170m, 340m, 760m or 1.3b."""
    out: Folder
    """New folder to write."""
    variant: str = "mac"
    """A block, or several joined by + that repeat from layer to layer: mac, mag, mal, lmm, attention, lmm+window, ...; or
    memorizing: windows, and a kNN store at three quarters of the depth.
    """
    match: bool = False
    """Narrow the feed-forward until the model has as many parameters as the Transformer of its preset."""
    seed: int = 0
    """Of the initial weights."""
    tokenizer: Path | None = None
    """A tokenizer.json (extra `hf`). Default: bytes."""

    def run(self) -> None:
        from remanence.cli.model_commands import new

        new(self.preset, self.out, self.variant, self.match, self.seed, self.tokenizer)


@dataclass(frozen=True)
class Read:
    """Read files of any size into a memory, in constant space, and save it. Interrupted, it saves what it has read."""

    model: Folder
    """The model's folder."""
    files: tyro.conf.Positional[tuple[Path, ...]]
    """Texts, read one after the other as one document."""
    save: Path
    """Memory file to write."""
    memory: Path | None = None
    """Memory file to start from."""
    resume: bool = False
    """Go on where --save ended: the same files, without what has been read of them."""
    force: bool = False
    """Accept a memory made with other weights of the same configuration."""
    device: Device = "auto"
    """Where to run."""

    def run(self) -> None:
        from remanence.cli.model_commands import read

        read(self.model, self.files, self.save, self.memory, self.resume, self.force, self.device)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    max_tokens: int = 128
    """How many tokens at most."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Only among so many of the most likely."""
    top_p: float | None = None
    """Only among the most likely whose probabilities add up to this."""
    stop: tuple[str, ...] = ()
    """Texts that end the output."""
    seed: int = 0
    """Of the random choice."""
    write: Write = "all"
    """What is written to the neural memory: the prompt and the model's own words, the prompt, or none of it."""
    force: bool = False
    """Accept a memory made with other weights of the same configuration."""
    device: Device = "auto"
    """Where to run."""

    def sampling(self) -> Sampling:
        from remanence.inference.generate import Sampling

        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Generate(Sampled):
    """Go on from a prompt, with or without a memory. Several prompts are answered side by side, as lines of JSON."""

    model: Folder
    """The model's folder."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")]
    """One or more texts to go on from."""
    memory: Path | None = None
    """Memory file to answer from."""
    save: Path | None = None
    """Memory file to write afterwards."""
    mode: Literal["on", "off", "frozen", "fresh"] = "on"
    """What becomes of the neural memory: read and written, absent, only read, begun anew at every segment."""

    def run(self) -> None:
        from remanence.cli.model_commands import generate

        generate(self.model, self.prompt, self.sampling(), self.memory, self.save, self.write, self.mode, self.force, self.device)


@dataclass(frozen=True, kw_only=True)
class Chat(Sampled):
    """Talk with a model line by line. With --memory it remembers from one conversation to the next."""

    model: Folder
    """The model's folder."""
    memory: Path | None = None
    """Memory file to take up if it exists, and to write after every answer."""

    def run(self) -> None:
        from remanence.cli.model_commands import chat

        chat(self.model, self.sampling(), self.memory, self.write, self.force, self.device)


@dataclass(frozen=True)
class Inspect:
    """What a memory file or a model's folder holds."""

    file: Folder
    """A memory file, or a model's folder."""
    json: bool = False
    """As JSON."""

    def run(self) -> None:
        from remanence.cli.model_commands import inspect

        inspect(self.file, self.json)


@dataclass(frozen=True)
class Lens:
    """A text as the model's memories saw it, as one HTML page: surprise, gates, norms, and for each token what they answer."""

    model: Folder
    """The model's folder."""
    text: Path
    """The text to read."""
    out: Path = Path("lens.html")
    """Page to write; one that is there is replaced."""
    memory: Path | None = None
    """Memory file to start from."""
    layers: tuple[int, ...] = ()
    """Show only the memories of these layers, from 1 on. Default: all."""
    reach: int = 8_192
    """How many tokens back to look for what an answer resembles, at most 65,535."""
    device: Device = "auto"
    """Where to run."""

    def run(self) -> None:
        from remanence.cli.model_commands import lens

        lens(self.model, self.text, self.out, self.memory, self.layers, self.reach, self.device)


@dataclass(frozen=True)
class Data:
    """Turn texts (plain, jsonl or parquet, folders of them, datasets of the hub) into token shards. Goes on if interrupted."""

    action: tyro.conf.Positional[Literal["prepare"]]
    """What to do."""
    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files and folders (also .xz .gz .bz2 .zst), and hf:NAME[@REVISION][:CONFIG[:SPLIT]], streamed (extra `data`)."""
    out: Path
    """Folder for the shards."""
    tokenizer: Path | None = None
    """A tokenizer.json (extra `hf`). Default: bytes."""
    field: str = "text"
    """Where a line of jsonl, or a row of a table, has its text."""
    workers: int = 1
    """Processes. The shards do not depend on it."""
    max_tokens: int | None = None
    """Take only the first documents that have this many tokens together, with the marks of their ends."""
    max_documents: int | None = None
    """Take only the first documents."""

    def run(self) -> None:
        from remanence.cli.train_commands import prepare_data

        limits = (self.max_tokens, self.max_documents)
        prepare_data(self.sources, self.out, self.tokenizer, self.field, self.workers, *limits)


@dataclass(frozen=True)
class Train:
    """Train a model by a recipe, in a new folder or, with --resume, on in one. --any.field=value changes the recipe's config."""

    recipe: tyro.conf.Positional[Path]
    """A Python file with a function recipe() that returns a TrainConfig."""
    out: Path | None = None
    """The run's folder."""
    resume: bool = False
    """Go on with the run in --out, from its last checkpoint."""
    dry_run: bool = False
    """Only tell what it would cost: parameters, memory, tokens, hours. Refuses what cannot fit."""
    gpus: int | None = None
    """For --dry-run: plan for so many GPUs instead of this machine."""
    gpu: str = "H100"
    """For --dry-run: of which kind."""
    overrides: tyro.conf.Suppress[tuple[tuple[str, str], ...]] = ()

    def run(self) -> None:
        from remanence.cli.train_commands import dry_run, train

        if self.dry_run:
            dry_run(self.recipe, dict(self.overrides), self.gpus, self.gpu)
        elif self.out is None:
            raise ValueError("--out: expected a folder for the run, got none")
        else:
            train(self.recipe, self.out, dict(self.overrides), self.resume)


@dataclass(frozen=True)
class Export:
    """Write a run's model as a folder of its own, for remanence and Hugging Face."""

    run_folder: tyro.conf.Positional[Path]
    """The run."""
    out: Folder
    """New folder to write."""
    memory: Path | None = None
    """A memory file to write: what one row of the batch remembered at the end, of a run with --carry=true."""
    row: int = 0
    """Which row."""

    def run(self) -> None:
        from remanence.cli.train_commands import export_run

        export_run(self.run_folder, self.out, self.memory, self.row)


@dataclass(frozen=True)
class Eval:
    """Measure a model: lm, wikitext, lambada, niah, babilong, recall, commonsense; of a recipe instead: ablate, depth.

    --task.setting=value changes a task's setting, --setting=value every named task's that has it (docs/evaluation.md lists them),
    --recipe.field=value the recipe. With --json, an evaluation that was interrupted goes on when started again.
    """

    model: Folder
    """The model's folder; for ablate and depth a recipe."""
    tasks: tyro.conf.Positional[tuple[str, ...]]
    """What to measure."""
    memory: tuple[Literal["on", "off", "frozen", "fresh"], ...] = ("on",)
    """Modes of the neural memory; with `off` among several, the differences to it are told."""
    json: Path | None = None
    """File for the rows. Results of single units, plots and runs are kept beside it."""
    device: Device = "auto"
    """Where to run."""
    seed: int = 0
    """Of all that is drawn."""
    overrides: tyro.conf.Suppress[tuple[tuple[str, str], ...]] = ()

    def run(self) -> None:
        from remanence.cli.eval_commands import evaluate_model

        evaluate_model(self.model, self.tasks, self.overrides, self.memory, self.json, self.device, self.seed)


@dataclass(frozen=True)
class Report:
    """Evaluations and training runs as one document, Markdown and HTML: the papers' numbers beside ours, with plots."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Files that `eval --json` wrote, and folders of training runs."""
    out: Path = Path("report.md")
    """Markdown to write; its pictures and the same as an HTML page are written beside it."""
    force: bool = False
    """Overwrite documents that no report wrote."""

    def run(self) -> None:
        from remanence.report import write

        print("\n".join(str(path) for path in write(self.runs, self.out, force=self.force)))


@dataclass(frozen=True)
class Presets:
    """Every preset and variant: its parameters, and the size of its state."""

    json: bool = False
    """As JSON."""
    match: bool = False
    """With the feed-forward narrowed until every variant has the Transformer's number of parameters."""

    def run(self) -> None:
        from remanence.cli.model_commands import presets

        presets(self.json, self.match)


@dataclass(frozen=True)
class Info:
    """Versions, device and operator backends: what a bug report needs."""

    device: Device = "auto"
    """Device to look for."""

    def run(self) -> None:
        import platform

        import torch

        import remanence
        from remanence.core.device import resolve
        from remanence.ops import BACKENDS

        python = f"Python {platform.python_version()}, {platform.platform()}"
        print(f"remanence {remanence.__version__}, torch {torch.__version__}, {python}")
        print(f"device {resolve(self.device)}, operator backends: {', '.join(BACKENDS)}")


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[New, tyro.conf.subcommand("new")]
    | Annotated[Read, tyro.conf.subcommand("read")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Lens, tyro.conf.subcommand("lens")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Presets, tyro.conf.subcommand("presets")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0 when done, 2 for a wrong argument or file, 130 after Ctrl-C; errors are one line, without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        from remanence import __version__

        print(f"remanence {__version__}")
        return
    try:
        _parsed(arguments).run()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError) as error:  # the last names the extra to install
        sys.exit(_say(f"remanence: error: {error}", 2))
    except KeyboardInterrupt:
        sys.exit(_say("remanence: interrupted", 130))


def _parsed(arguments: list[str]) -> Command:
    """What was asked for. A wrong argument is one line, like every other error, instead of tyro's box of several."""
    arguments, overrides = _overrides(arguments)
    described = "Sequence models that keep learning after training ends."
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            command = tyro.cli(Command, prog="remanence", description=described, args=arguments)
            return replace(command, overrides=overrides) if isinstance(command, Train | Eval) else command
        except SystemExit as stop:
            code = stop.code
    if code:
        lines = [line.strip("╰╯│─ ") for line in said.getvalue().splitlines() if not line.startswith("╭")]
        message = " ".join(line for line in lines if line)
        sys.exit(_say(f"remanence: error: {message}", 2))
    sys.exit(code)


OWN = {"train": ("out", "resume", "dry-run", "gpus", "gpu", "help"), "eval": ("memory", "json", "device", "seed", "help")}
"""Commands whose other arguments are fields of something that only Python files know, and the arguments that are not."""


def _overrides(arguments: list[str]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """The arguments that are fields of a recipe's config or of a task, as --optimizer.lr=3e-4; and what is left."""
    if not arguments or arguments[0] not in OWN:
        return arguments, ()
    own = [f"--{name}" for name in OWN[arguments[0]]] + ["-h"]
    foreign = [argument for argument in arguments if argument.startswith("-") and argument.partition("=")[0] not in own]
    for argument in foreign:
        if "=" not in argument or not argument.startswith("--"):
            fields = "the config" if arguments[0] == "train" else "a task"
            sys.exit(_say(f"remanence: error: {argument}: expected --field=value for a field of {fields}", 2))
    pairs = tuple((name, value) for name, _, value in (argument[2:].partition("=") for argument in foreign))
    return [argument for argument in arguments if argument not in foreign], pairs


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
