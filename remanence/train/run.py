"""The training loop. Everything that a step needs is computed from the step number or stored in the
checkpoint.

A run that was killed and resumed therefore gives the same result as a run without an interruption.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from remanence.data import Batch
from remanence.data.streams import PREFIX
from remanence.inference.generate import Generation
from remanence.inference.sampling import Sampling
from remanence.io.files import locked, remove_leftovers, replacing_folder, write_json
from remanence.io.tensors import write_tensors
from remanence.memory.policies import unigrams
from remanence.model import State
from remanence.ops import clamped
from remanence.runtime.errors import DivergedError, OtherConfigError
from remanence.runtime.overrides import differences
from remanence.tokenizers.tokens import load_tokenizer
from remanence.train import checkpoint, engine
from remanence.train.carry import carry_in, carry_out
from remanence.train.checkpoint import Progress
from remanence.train.config import TrainConfig
from remanence.train.distributed import ProcessGroup, gather_model, join_process_group, shard_like
from remanence.train.engine import Step
from remanence.train.export import run_config, save_model, trained_on
from remanence.train.initial_state import make_initial_state
from remanence.train.language import make_task, resolve_start
from remanence.train.metrics import Line, Metrics, check_trackers
from remanence.train.plots import plot
from remanence.train.run_folder import check_free, check_tokenizer, emptied_on_failure
from remanence.train.signals import received_signals
from remanence.train.sources import (
    SOURCES,
    Prefetcher,
    Source,
    check_corpus,
    corpus,
    tokenizer_of,
)
from remanence.train.validation import Validation

Log = Callable[[Line], None]


class TrainingError(DivergedError):
    """Raised when too many consecutive steps had a loss or a gradient that is not finite."""


def fit(
    config: TrainConfig | None,
    out: str | Path,
    *,
    resume: bool = False,
    log: Log | None = None,
    source: Source | None = None,
) -> Any:
    """Train a model in a new folder, or resume the run in a folder, and return the model.

    The folder `out` then holds config.json, metrics (.jsonl, .png), checkpoints and the model. An existing
    run is never overwritten. With `resume` the config in the folder is used, and `config` may be None. `log`
    is called with each line of the metrics. On SIGTERM, the run saves a checkpoint and returns. On Ctrl-C, it
    saves a checkpoint and raises KeyboardInterrupt; a second Ctrl-C interrupts at once. On SIGUSR1, it adds
    generated text to samples.jsonl. `source` replaces the source of batches that the config names, for data
    that is not stored in files. With `validate_every`, the returned model is the one with the lowest
    validation loss. When started by `torchrun`, the rows and the weights are divided among the processes
    (FSDP2); the result is the same up to rounding.
    """
    with Run.open(config, out, resume=resume, log=log, source=source) as run:
        run.train()
    return run.model


class Run:
    """An open training run: its model, its optimizer and its progress, one step at a time.

    `fit` is the same as ``with Run.open(config, "out/run") as run: run.train()``. In a loop of your own, call
    `step` until `done` is true, then `finish`. Closing a run frees its resources and saves nothing: a run
    that is closed early can be resumed from its last checkpoint.
    """

    @classmethod
    def open(
        cls,
        config: TrainConfig | None,
        out: str | Path,
        *,
        resume: bool = False,
        log: Log | None = None,
        source: Source | None = None,
    ) -> Run:
        """Start a run in a new or empty folder, or resume the run in the folder.

        An invalid config leaves no files.
        """
        out = Path(out)
        config = run_config(out) if resume else resolve_config(config)
        with ExitStack() as resources:
            process_group = resources.enter_context(join_process_group(config.device))
            if not resume:
                process_group.run_on_rank0(lambda: check_free(out))
            process_group.run_on_rank0(lambda: resources.enter_context(locked(out, "a training run")))
            if not resume:  # another process may have used the folder before the lock was taken
                process_group.run_on_rank0(lambda: check_free(out))
                resources.enter_context(emptied_on_failure(out, process_group))
            process_group.run_on_rank0(lambda: remove_leftovers(out))
            run = cls(config, out, process_group, resume, source)
            if process_group.device.type == "cuda" and run.task.prefetch:
                run.prefetcher = resources.enter_context(closing(Prefetcher(run.source)))
            metrics = run._open_metrics(log)
            run.metrics = resources.enter_context(metrics) if metrics else None
            run._resources = resources.pop_all()
        return run

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        process_group: ProcessGroup,
        resume: bool,
        source: Source | None = None,
    ) -> None:
        """Not meant to be called directly: use `open`, which first joins the process group."""
        self.config, self.out, self.process_group = config, out, process_group
        self.metrics: Metrics | None = None
        self._resources = ExitStack()
        check_trackers(config.trackers)
        self.task, self.initial_state = (
            make_task(config, process_group, source),
            make_initial_state(config, process_group),
        )
        self.source = self.task.source
        if source is None and not resume:
            check_tokenizer(config.init_from, tokenizer_of(self.source))
        self.prefetcher: Prefetcher | None = None
        if config.graph and process_group.device.type != "cuda":
            kind = process_group.device.type
            raise ValueError(f"graph: expected None or false on {kind}, which has no CUDA graphs, got true")
        torch.manual_seed(config.seed)
        resumed = resume and bool(checkpoint.checkpoints(out / "checkpoints"))
        self.model: Any = self.task.shard(self.task.build_model(resumed).to(process_group.device).train())
        self.model.checkpointing = config.checkpointing
        if config.compile:
            engine.compile_parts(self.model)
        self.optimizer = engine.make_optimizer(self.model, config)
        process_group.run_on_rank0(lambda: self._make_folder(resume))
        self.progress, self.carried = self._load(resume)
        self.validation = Validation(out, self.progress.step, config.stop_after, process_group)
        if not self.done:
            # The folder `model` exists if the run finished before and `steps` was then increased.
            process_group.run_on_rank0(lambda: shutil.rmtree(out / "model", ignore_errors=True))
        self.graphs = self.task.captured_steps(self.model, self.initial_state is not None)
        self._clamped = clamped()  # the count of this process so far

    @property
    def done(self) -> bool:
        """Whether all steps were taken, or validation has stopped the run early."""
        return self.progress.step >= self.config.steps or self.validation.stopped

    def train(self) -> None:
        """Take all remaining steps, then call `finish`.

        Signals are handled between steps, as `fit` describes.
        """
        with received_signals() as received:
            while not self.done:
                ends = bool(received & {"SIGTERM", "SIGINT"})
                stop, samples = self.process_group.sum_over_processes(ends, "SIGUSR1" in received)
                if stop:
                    break
                if samples:
                    received.discard("SIGUSR1")
                    self.sample()
                self.step()
            self.checkpoint()
            if "SIGINT" in received:
                raise KeyboardInterrupt
            self.finish()

    def step(self) -> Step:
        """Take the next step, log its metrics, and write a checkpoint at every `save_every`-th step."""
        config, number = self.config, self.progress.step
        self.carried = self.task.before_step(self.model, self.carried, number)
        first = number * config.accumulate
        batches = [
            (self.prefetcher or self.source).step(index) for index in range(first, first + config.accumulate)
        ]
        graph, state = self.graphs.select_graph(batches, self.carried), None
        if graph is None and config.carry:
            state = carry_in(self.model, self.carried, batches[0], self.initial_state, number)
        initial_state = None if config.carry else self.initial_state
        step = engine.take_step(
            self.model, self.optimizer, config, batches, state, number, self.process_group, initial_state,
            graph=graph, carried=self.carried, task=self.task,
        )  # fmt: skip
        if self.initial_state is not None and step.taken:
            self.initial_state.after_step(step.trace.state, batches[-1])
        if config.carry:
            # After a skipped step, rows keep the state from before it, except where a document begins.
            after = (
                step.trace.state if step.taken else state or carry_in(self.model, self.carried, batches[0])
            )
            self.carried = carry_out(self.model, after, batches[-1], graph is not None)
        self._count(step)
        self._log(step, self._validate())
        if self.progress.skipped_in_a_row >= config.patience:
            self._give_up(batches)
        if self.progress.step % config.save_every == 0:
            self.checkpoint()
        return step

    def checkpoint(self) -> None:
        """Write a checkpoint of the current step if there is none yet, and remove all but the last `keep`
        ones.
        """
        if self.metrics:
            self.metrics.flush()
        where = self.out / "checkpoints"
        parts = self.model, self.optimizer, self.progress, self.carried
        checkpoint.save(where, *parts, self.config, self.process_group, self.initial_state)

    @torch.no_grad()
    def sample(self) -> None:
        """Add a line with generated text to samples.jsonl. All processes have to call it."""
        if not (self.out / "tokenizer").is_dir():
            return  # generated tasks have no tokenizer
        prompt, step = self.config.prompt, self.progress.step
        sampling = Sampling(max_tokens=self.config.sample_tokens, temperature=0.8, seed=step)
        line = {"step": step, "prompt": prompt}
        self.model.eval()
        try:
            tokenizer = load_tokenizer(self.out / "tokenizer")
            line["text"] = Generation(self.model, [prompt], sampling, tokenizer=tokenizer).run().texts[0]
        except (ValueError, OSError) as error:  # a failed sample must not end the run
            line["error"] = str(error)
        finally:
            self.model.train()
        if self.process_group.is_first:
            with (self.out / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """Write a checkpoint and the plot of the metrics.

        If the run is done, also write the folder `model`.
        """
        self.checkpoint()
        if self.metrics and self.metrics.written:
            plot(self.out)
        if not self.done:
            return
        self.validation.restore(self.model)
        if (model := gather_model(self.model, self.process_group)) is not None:
            shutil.rmtree(self.out / "model", ignore_errors=True)
            with replacing_folder(self.out / "model") as folder:
                save_model(model, self.out, folder, trained_on(self.progress, self.config))

    def close(self) -> None:
        """Close the metrics and leave the process group. The model stays usable."""
        self._resources.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def _make_folder(self, resume: bool) -> None:
        """Create the run folder with its config, the digest of the corpus and the tokenizer."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not resume:
            write_json(self.out / "config.json", self.config.to_dict())
        check_corpus(self.source, self.out)
        if (tokenizer := tokenizer_of(self.source)) is not None:
            (self.out / "tokenizer").mkdir(exist_ok=True)
            tokenizer.save(self.out / "tokenizer")

    def _load(self, resume: bool) -> tuple[Progress, State | None]:
        """Load the last checkpoint. Return the progress and the carried state, which is None if rows carry
        none.

        Without a checkpoint, return those of a new run.
        """
        found = checkpoint.checkpoints(self.out / "checkpoints") if resume else []
        if not found:
            self._count_unigrams()
            return Progress(), None
        try:
            progress, carried = checkpoint.load(
                found[-1], self.model, self.optimizer, self.process_group, self.initial_state,
                stored_config=self.task.stored_config,
            )  # fmt: skip
            self._check_config(checkpoint.saved_config(found[-1]), carried)
            return progress, carried
        except OtherConfigError:
            raise
        except ValueError as error:
            others = len(found) > 1
            hint = (
                f"remove that folder to go on from {found[-2].name}" if others else "there is none before it"
            )
            raise ValueError(f"{error}; the checkpoint cannot be taken up, {hint}") from None

    def _check_config(self, saved: Mapping[str, object] | None, carried: State | None) -> None:
        """Warn about changes to the run's config since the checkpoint.

        Raise an error if the run cannot continue.
        """
        config = self.config
        rows = config.batch // (config.accumulate * self.process_group.size)
        staged = bool(config.data.stages)  # with stages, the number of rows changes during the run
        if carried is not None and not staged and len(carried.position) != rows:
            had = len(carried.position) * config.accumulate * self.process_group.size
            raise OtherConfigError(
                f"batch: expected {had}, the rows whose memories the checkpoint carries, got {config.batch}"
            )
        changed = [] if saved is None else list(differences(_current(saved), _plain(config)))
        if changed and self.process_group.is_first:
            listed = ", ".join(f"{name} {before!r} -> {now!r}" for name, before, now in changed)
            warnings.warn(f"{self.out / 'config.json'}: changed since the checkpoint: {listed}", stacklevel=2)

    def _count_unigrams(self) -> None:
        """Count token frequencies for models that store rare tokens.

        Skipped with `init_from`: that model has them.
        """
        config, table = self.config, self.model.log_unigrams
        if table is None or config.init_from is not None:
            return
        # Read the rows of all processes, so that every process gets the same counts.
        source = SOURCES[config.data.kind](config, config.batch, 0, 1)
        counted = unigrams(corpus(source), config.model.vocab_size)
        table.copy_(shard_like(counted.to(table.dtype), table))

    def _open_metrics(self, log: Log | None) -> Metrics | None:
        """Open the metrics in the first process, which writes them for all.

        Return None in the other processes.
        """
        opened: list[Metrics] = []
        about = self.out, self.config, self.progress, log, self.process_group.device
        self.process_group.run_on_rank0(lambda: opened.append(Metrics(*about)))
        return opened[0] if opened else None

    def _count(self, step: Step) -> None:
        """Add a step to the progress of the run."""
        before = self.progress
        self.progress = Progress(
            step=before.step + 1,
            tokens=before.tokens + step.tokens,
            skipped=before.skipped + (not step.taken),
            skipped_in_a_row=0 if step.taken else before.skipped_in_a_row + 1,
        )

    def _validate(self) -> float | None:
        """Return the loss on held-out data at every `validate_every`-th step and the last one, else None."""
        every, at = self.config.validate_every, self.progress.step
        if not every or (at % every and at != self.config.steps):
            return None
        value = self.task.validate(self.model)
        self.validation.add(at, value, self.model)
        return value

    def _log(self, step: Step, validation: float | None = None) -> None:
        """Write a line of metrics at every `log_every`-th step, at the last one, and at every validation."""
        at = self.progress.step
        if at % self.config.log_every and at != self.config.steps and validation is None:
            return
        before, self._clamped = self._clamped, clamped()
        summed = int(self.process_group.sum_over_processes(self._clamped - before)[0])
        if self.metrics:
            self.metrics.write(self.progress, step, self.process_group.size, summed, validation)

    def _give_up(self, batches: list[Batch]) -> None:
        """Save the batches of the failed step to a file, and raise `TrainingError`."""
        rank = f"-{self.process_group.rank}" if self.process_group.size > 1 else ""
        bad = self.out / f"bad-batch{rank}.safetensors"
        write_tensors(bad, _replayable(batches), {"step": str(self.progress.step - 1)})
        count = self.progress.skipped_in_a_row
        raise TrainingError(f"loss: expected finite numbers, got {count} steps in a row without; see {bad}")


def resolve_config(config: TrainConfig | None) -> TrainConfig:
    """Return the config of a new run with absolute paths.

    If `init_from` is given, its model config is used.
    """
    if config is None:
        raise ValueError("config: expected a TrainConfig for a new run, got None")
    return resolve_start(replace(config, data=config.data.map_paths(_absolute)))


def _absolute(path: str | None) -> str | None:
    """Make a path absolute, as a run may be resumed in another directory. None and ``hf:NAME`` are kept."""
    return path if path is None or path.startswith(PREFIX) else str(Path(path).resolve())


def _current(saved: Mapping[str, object]) -> Mapping[str, object]:
    """Convert a checkpoint's config to the current field names, so that a renamed field is not reported as
    changed.
    """
    try:
        return _plain(TrainConfig.from_dict(saved))
    except ValueError:  # accepted by an earlier version only; the run's config.json was corrected since
        return saved


def _plain(config: TrainConfig) -> dict[str, object]:
    """Convert a config to the plain data that a JSON file stores, with lists instead of tuples."""
    return json.loads(json.dumps(config.to_dict()))


def _replayable(batches: list[Batch]) -> dict[str, Tensor]:
    """Return all tensors of a step's batches as ``{"field.part": tensor}``, from which the step can be
    repeated.
    """
    parts = {}
    for index, batch in enumerate(batches):
        for name, value in batch._asdict().items():
            if value is not None:
                parts[f"{name}.{index}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return parts
