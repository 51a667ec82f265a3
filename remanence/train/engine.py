"""The loop. Everything a step needs is a function of its number or lies in the checkpoint, so a run that was killed goes on as
if it had not been.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.config import known
from remanence.core.files import read_json, write_json, write_tensors
from remanence.core.state import placed, places, where
from remanence.core.tokens import Tokenizer, load_tokenizer
from remanence.data import Batch
from remanence.data.streams import PREFIX
from remanence.folder import read_config
from remanence.inference import memfile
from remanence.inference.generate import Generation, Sampling
from remanence.inference.graphs import border_of, unsupported
from remanence.memory.policies import unigrams
from remanence.model import Model, State, Trace
from remanence.ops import leashed
from remanence.train import checkpoint
from remanence.train.begin import Begin, begin_of
from remanence.train.checkpoint import Progress
from remanence.train.config import TrainConfig
from remanence.train.distributed import World, full, joined, shard, spread, whole
from remanence.train.graphed import SHARE, Graphed
from remanence.train.metrics import Line, Metrics, check_trackers
from remanence.train.plots import plot
from remanence.train.sources import SOURCES, Source, corpus, model_folder, tokenizer_of

SAMPLE = "It was 1851, and the whale - précisément - 10,000 miles away; \t'Nobody' knew."
TRAINED = "trained.json"
"""Beside a trained model: the steps and tokens it was trained on, and the kind of their data."""


class TrainingError(ValueError):
    """A run that could not go on: too many steps in a row had a loss or a gradient that is not finite."""


class Step(NamedTuple):
    """What one step came to, of all processes together; `seen` is this one's."""

    loss: float
    gradient: float
    taken: bool
    tokens: int
    seen: Trace


def fit(
    config: TrainConfig | None,
    out: str | Path,
    *,
    resume: bool = False,
    log: Callable[[Line], None] | None = None,
) -> Model:
    """Train a model in a new folder, or go on in one: ``out`` then holds config.json, metrics (.jsonl, .png), checkpoints, model.

    An existing run is never overwritten. With `resume` the run's own config counts, and `config` may be None. `log` gets each
    line of the metrics. SIGTERM saves a checkpoint and returns; Ctrl-C does, too, before it interrupts (pressed twice, at once);
    SIGUSR1 writes a sample to samples.jsonl. Started by `torchrun`, the processes share the rows and the weights (FSDP2); the
    result is the same up to rounding.
    """
    out = Path(out)
    config = _config(config, out, resume)
    if not resume:
        config = started(config)
    with joined(config.device) as world:
        if not resume:
            world.one(lambda: _room(out))
        return _fit(config, out, resume, log, world)


def _fit(config: TrainConfig, out: Path, resume: bool, log: Callable[[Line], None] | None, world: World) -> Model:
    source, begin = _source(config, resume, world), begin_of(config, world)
    if config.graph and world.device.type != "cuda":
        raise ValueError(f"graph: expected None or false on {world.device.type}, which has no CUDA graphs, got true")
    torch.manual_seed(config.seed)
    model = shard(_first(config, out).to(world.device).train(), world)
    model.checkpointing = config.checkpointing
    if config.compile:
        compile_parts(model)
    optimizer = make_optimizer(model, config)

    def make_folder() -> None:  # only now: a config that cannot be run leaves nothing behind
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            write_json(out / "config.json", config.to_dict())
        if (tokenizer := tokenizer_of(source)) is not None:
            (out / "tokenizer").mkdir(exist_ok=True)
            tokenizer.save(out / "tokenizer")

    world.one(make_folder)
    progress, carried = Progress(), None
    if found := checkpoint.checkpoints(out / "checkpoints"):
        progress, carried = _taken_up(found, model, optimizer, world, begin)
    elif model.log_unigrams is not None and config.start is None:  # a model that is trained on knows what is rare
        # Of all rows: every process counts the same.
        table = unigrams(corpus(SOURCES[config.data.kind](config, config.batch, 0, 1)), config.model.vocabulary)
        model.log_unigrams.copy_(spread(table.to(model.log_unigrams.dtype), model.log_unigrams))
    if progress.step < config.steps:
        world.one(lambda: shutil.rmtree(out / "model", ignore_errors=True))  # of a run that was to be shorter
    opened: list[Metrics] = []
    world.one(lambda: opened.append(_metrics(config, out, progress, log, world, resume)))
    metrics = opened[0] if opened else None

    def save() -> None:
        checkpoint.save(out / "checkpoints", model, optimizer, progress, carried, config.keep, world, begin)

    graphs = Graphs(model, config, world, begin is not None)
    held = leashed()  # in the whole process so far
    with _signals() as asked, metrics or nullcontext():
        while progress.step < config.steps:
            ended, samples = world.total(bool(asked & {"SIGTERM", "SIGINT"}), "SIGUSR1" in asked)
            if ended:
                break
            if samples:
                asked.discard("SIGUSR1")
                sample(model, config, progress.step, out, world)
            batches = [source.step(progress.step * config.accumulate + part) for part in range(config.accumulate)]
            graph, state = graphs.of(batches, carried), None
            if graph is None and config.carry:
                state = _renewed(model, carried, batches[0], begin, progress.step)
            step = take_step(
                model, optimizer, config, batches, state, progress.step, world, None if config.carry else begin,
                graph=graph, carried=carried,
            )  # fmt: skip
            if begin is not None and step.taken:
                begin.ended(step.seen.state, batches[-1])
            if config.carry:  # what a skipped step read is not kept, but where documents have begun is
                after = step.seen.state if step.taken else state or _renewed(model, carried, batches[0])
                carried = _without(model, after, batches[-1], graph is not None).detach()
            in_a_row = 0 if step.taken else progress.skipped_in_a_row + 1
            progress = Progress(progress.step + 1, progress.tokens + step.tokens, progress.skipped + (not step.taken), in_a_row)
            if progress.step % config.log_every == 0 or progress.step == config.steps:
                before, held = held, leashed()
                summed = int(world.total(held - before)[0])
                if metrics:
                    metrics.write(progress, step, world.size, summed)
            if in_a_row >= config.patience:
                bad = out / f"bad-batch{f'-{world.rank}' if world.size > 1 else ''}.safetensors"
                write_tensors(bad, _replayable(batches), {"step": str(progress.step - 1)})
                raise TrainingError(f"loss: expected finite numbers, got {in_a_row} steps in a row without; see {bad}")
            if progress.step % config.save_every == 0:
                save()
        save()
        if "SIGINT" in asked:
            raise KeyboardInterrupt
        if metrics and metrics.written:
            plot(out)
        if progress.step == config.steps and (finished := whole(model, world)) is not None:
            finished.save(out / "model")
            _save_tokenizer(out, out / "model")
            told = {"tokens": progress.tokens, "steps": progress.step, "data": config.data.kind}
            write_json(out / "model" / TRAINED, told)
    return model


def _source(config: TrainConfig, resume: bool, world: World) -> Source:
    """What this process reads, after all that a config can be wrong in beside its model."""
    shares = config.accumulate * world.size
    if config.batch % shares:
        raise ValueError(f"batch: expected a multiple of accumulate x processes = {shares}, got {config.batch}")
    known("data.kind", config.data.kind, SOURCES)
    check_trackers(config.trackers)
    source = SOURCES[config.data.kind](config, config.batch // shares, world.rank, world.size)
    if config.start is not None and not resume and (tokenizer := tokenizer_of(source)) is not None:
        _same_words(config.start, tokenizer)
    return source


def _taken_up(
    found: list[Path], model: Model, optimizer: torch.optim.Optimizer, world: World, begin: Begin | None
) -> tuple[Progress, State | None]:
    try:
        return checkpoint.load(found[-1], model, optimizer, world, begin)
    except ValueError as error:
        before = f"remove that folder to go on from {found[-2].name}" if len(found) > 1 else "there is none before it"
        raise ValueError(f"{error}; the checkpoint cannot be taken up, {before}") from None


def _metrics(
    config: TrainConfig, out: Path, progress: Progress, log: Callable[[Line], None] | None, world: World, resume: bool
) -> Metrics:
    try:
        return Metrics(out, config, progress, log, world.device)
    except ValueError:
        if not resume:  # nothing of this run is worth keeping
            shutil.rmtree(out)
        raise


def _replayable(batches: list[Batch]) -> dict[str, Tensor]:
    """All that a step read, by part: what `take_step` needs to do it again."""
    parts = {}
    for number, batch in enumerate(batches):
        for name, value in batch._asdict().items():
            if value is not None:
                parts[f"{name}.{number}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return parts


def compile_parts(model: Model) -> None:
    """Compile what is the same for every call: the feed-forward nets. A memory's loop over chunks would be unrolled."""
    for block in model.blocks:
        block.ffn.compile(dynamic=True)  # type: ignore[union-attr]


@torch.no_grad()
def sample(model: Model, config: TrainConfig, step: int, out: Path, world: World) -> None:
    """One more line of samples.jsonl: what the model says now. All processes take part, as each holds a part of the weights."""
    if not (out / "tokenizer").is_dir():
        return  # generated tasks have none
    sampling = Sampling(max_tokens=config.sample_tokens, temperature=0.8, seed=step)
    line = {"step": step, "prompt": config.prompt}
    model.eval()
    try:
        made = Generation(model, [config.prompt], sampling, tokenizer=load_tokenizer(out / "tokenizer")).run()
        line["text"] = made.texts[0]
    except (ValueError, OSError) as error:  # a look at a run must not end it
        line["error"] = str(error)
    finally:
        model.train()
    if world.first:
        with (out / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def export(run: str | Path, out: str | Path, memory: str | Path | None = None, row: int = 0) -> Path:
    """A run's model as a folder of its own, for `Model.load` and Hugging Face: the finished one, or its last checkpoint's.

    `memory` is a file for what one of the batch's rows remembered at the end, of a run that carried its memories (``carry``).
    """
    run, out = Path(run), Path(out)
    config = run_config(run)
    carried = None if memory is None else _carried(run, config, row)
    found = [run / "model"] if (run / "model" / "config.json").is_file() else checkpoint.checkpoints(run / "checkpoints")[-1:]
    if not found:
        raise ValueError(f"run: expected a model or a checkpoint in {run}, got neither")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}, which is not; nothing is ever overwritten")
    model = checkpoint.load_model(found[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        model.save(temporary)
        _save_tokenizer(run, temporary)
        write_json(temporary / TRAINED, _trained(found[0], config))
        if carried is not None and memory is not None:
            memfile.save(memory, model, carried)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found[0]


def _trained(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """What a finished model or a checkpoint has been trained on so far."""
    if (folder / TRAINED).is_file():
        return read_json(folder / TRAINED)
    progress = read_json(folder / "progress.json")
    return {"tokens": progress["tokens"], "steps": progress["step"], "data": config.data.kind}


def _carried(run: Path, config: TrainConfig, row: int) -> State:
    """What one of a batch's rows remembered at a run's end."""
    found = checkpoint.checkpoints(run / "checkpoints")
    state = checkpoint.load_carried(found[-1]) if config.carry and found else None
    if state is None:
        raise ValueError(f"memory: expected a run that carries its memories (--carry=true), got {run}, which does not")
    if not 0 <= row < len(state.position):
        raise ValueError(f"row: expected from 0 to {len(state.position) - 1}, a row of the run's batch, got {row}")
    inside = [number for number, place in enumerate(places(state.position)) if place]
    if row not in inside:
        others = f"one of {', '.join(map(str, inside))}" if inside else "one more step, as no row is inside a document"
        raise ValueError(f"row: expected {others}, got {row}, whose document ended with the run's last step")
    return state.rows([row])


def _save_tokenizer(run: Path, folder: Path) -> None:
    """The data's tokenizer beside the model: the folder is then all that reading and generating need."""
    if (run / "tokenizer").is_dir():
        load_tokenizer(run / "tokenizer").save(folder)


def _config(config: TrainConfig | None, out: Path, resume: bool) -> TrainConfig:
    """The run's config: the one given if there is room for a new run, or the run's own if it goes on."""
    if resume:
        return run_config(out)
    if config is None:
        raise ValueError("config: expected a TrainConfig for a new run, got None")
    return config


def started(config: TrainConfig) -> TrainConfig:
    """With the model that `start` names, if it names one, and whole paths: a run may be taken up from another folder."""
    whole = lambda path: path if path is None or path.startswith(PREFIX) else str(Path(path).resolve())
    config = replace(config, data=replace(config.data, path=whole(config.data.path), books=whole(config.data.books)))
    if config.start is None:
        return config
    return replace(config, start=whole(config.start), model=read_config(model_folder(config.start)))


def _first(config: TrainConfig, out: Path) -> Model:
    """The model before the first step; one that goes on gets its weights from a checkpoint."""
    if config.start is None or checkpoint.checkpoints(out / "checkpoints"):
        return Model(config.model)
    return Model.load(config.start, dtype=torch.float32)


def _same_words(start: str, tokenizer: Tokenizer) -> None:
    """A model that is trained on goes on reading what it can read."""
    if not (Path(start) / "tokenizer.json").is_file():
        return  # trained on made-up symbols
    own = load_tokenizer(start)
    if own.vocabulary != tokenizer.vocabulary or own.encode(SAMPLE) != tokenizer.encode(SAMPLE):
        raise ValueError(f"start: expected data with the tokens of {start}, got other ones; prepare it with that tokenizer")


def run_config(run: str | Path) -> TrainConfig:
    """The config that a run was started with."""
    path = Path(run) / "config.json"
    if not path.is_file():
        raise ValueError(f"out: expected a run, with its config.json, got {run}")
    return TrainConfig.from_dict(read_json(path))


def _room(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}; --resume goes on with a run that is there")


def make_optimizer(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only: not gains, biases, embeddings' rows of rare tokens, or where a memory begins."""
    decayed = [parameter for name, parameter in model.named_parameters() if name.endswith("proj.weight") or ".ffn." in name]
    kept = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in kept]
    o = config.optimizer
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=model.embed.weight.device.type == "cuda" or None)


def take_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    batches: list[Batch],
    state: State | None,
    number: int,
    world: World | None = None,
    begin: Begin | None = None,
    *,
    graph: Graphed | None = None,
    carried: State | None = None,
) -> Step:
    """Forward and backward of every part, then the update; skipped if the loss or the gradient is not finite.

    Rows that carry nothing begin in `state`, or as `begin` says. With a `graph` they go on from what they `carried` themselves.
    """
    world = world or World(model.embed.weight.device)
    asked_here = sum(int((batch.targets >= 0).sum()) for batch in batches)
    read_here = sum(batch.tokens.numel() if batch.mask is None else int(batch.mask.sum()) for batch in batches)
    count, tokens = world.total(asked_here, read_here)
    optimizer.zero_grad(set_to_none=True)
    loss_here: Any = 0.0
    for part, batch in enumerate(batches):
        if graph is not None:
            loss_here, seen = graph(batch.tokens, batch.targets, carried, batch.begins, max(1, int(count)))
            break
        if begin is not None:
            fresh = model.start(batch.tokens.shape[0] if batch.offsets is None else len(batch.offsets) - 1)
            state = begin.begun(fresh, batch, number * config.accumulate + part)
        # Where documents are read to their ends, padding stands behind the last token of one, and its row begins anew.
        mask = batch.mask if batch.begins is None else None
        every = asked_here == sum(each.targets.numel() for each in batches)
        batch = Batch._make(x.to(world.device, non_blocking=True) if isinstance(x, Tensor) else x for x in batch)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            kept = config.carry or begin is not None
            seen = model.trace(batch.tokens, state, mask=None if mask is None else batch.mask, offsets=batch.offsets, keep=kept)
            asked = slice(None) if every else batch.targets >= 0
            logits = model.logits(seen.hidden[asked]).flatten(0, -2)
            loss = F.cross_entropy(logits.float(), batch.targets[asked].flatten(), reduction="sum") / max(1, count)
        (loss * world.size).backward()  # FSDP takes the mean over processes, of what is a share of the sum
        loss_here = loss_here + loss.detach()
    gradient = full(nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip))
    loss_total, norm = world.total(float(loss_here))[0], float(gradient)
    taken = isfinite(loss_total) and isfinite(norm)
    if taken:
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(number, config.steps)
        optimizer.step()
    return Step(loss_total, norm, taken, int(tokens), seen)


class Graphs:
    """Which steps of a run are captured as a CUDA graph (`Graphed`): with ``graph`` none or all that can be; by default those of
    a run whose first steps left enough of the GPU's memory free.
    """

    EAGER = 2
    """Steps before the first graph: kernels are built, and the memory is measured."""

    def __init__(self, model: Model, config: TrainConfig, world: World, begins: bool) -> None:
        self.graphed = Graphed(model, torch.bfloat16 if config.precision == "bfloat16" else None)
        self.config, self.steps, self.captured, self.said = config, 0, False, ""
        self.reason = "steps are shared by several processes" if world.size > 1 else None
        self.reason = self.reason or ("rows begin in states that the host chooses" if begins else None)
        self.reason = self.reason or ("several parts make a step" if config.accumulate > 1 else None)
        self.reason = self.reason or ("config.graph is off" if config.graph is False else None)

    def of(self, batches: list[Batch], carried: State | None) -> Graphed | None:
        """The graph for a step, or None."""
        graph = self._of(batches[0], carried)
        self.captured = graph is not None
        said = "captured as a CUDA graph" if graph else f"launched by the host: {self.reason}" if self.reason else None
        if said is not None and said != self.said:
            self.said = said
            logging.getLogger("remanence").info("training steps: %s", said)
        return graph

    def _of(self, batch: Batch, carried: State | None) -> Graphed | None:
        self.steps += 1
        model = self.graphed.model
        if self.reason is not None or self.steps <= self.EAGER or batch.offsets is not None:
            return None
        if batch.mask is not None and batch.begins is None:
            return None
        if self.captured:  # the step before, which left its rows where they can go on
            return self.graphed
        if self.config.carry and (carried is None or not _at_border(model, carried)):
            return None
        self.reason = unsupported(model, batch.tokens.shape[1], self.config.carry)
        if self.reason is None and self.config.graph is None and not self.graphed.held:
            most, room = torch.cuda.max_memory_allocated(self.graphed.device), torch.cuda.mem_get_info(self.graphed.device)[1]
            if most > SHARE[self.config.carry] * room:
                self.reason = "a step needs too much of the GPU's memory"
        return None if self.reason else self.graphed


def _at_border(model: Model, state: State) -> bool:
    return all(place % border_of(model) == 0 for place in places(state.position))


def _without(model: Model, state: State, batch: Batch, graph: bool) -> State:
    """Rows whose document ended in a step have read padding behind it: they are said to stand at 0, and the next step, which
    begins a document, begins them anew. Behind a graph those whose memory diverged in it begin anew at once (else `_renewed`
    does it).
    """
    if graph and bool((bad := state.diverged).any()):
        state = where(bad.tolist(), model.start(len(bad)).detach(), state)
    if batch.begins is None or batch.mask is None or bool(batch.mask.all()):
        return state
    ended = (~batch.mask.all(1)).tolist()
    known = [0 if over else place for over, place in zip(ended, places(state.position), strict=True)]
    return state._replace(position=placed(torch.tensor(known, device=state.position.device), known))


def _renewed(model: Model, carried: State | None, batch: Batch, begin: Begin | None = None, number: int = 0) -> State:
    """The state that rows carry into a step: what they had, or a new one where a document begins or a memory has diverged.

    The new one is made and is part of the graph in any case: with sharded weights both are collective calls.
    """
    fresh = model.start(batch.tokens.shape[0])
    if begin is not None:
        fresh = begin.begun(fresh, batch, number, carried)
    if carried is None:
        return fresh
    anew = carried.diverged if batch.begins is None else carried.diverged | batch.begins.to(carried.position.device)
    return where(anew.tolist(), fresh, carried)


@contextmanager
def _signals() -> Iterator[set[str]]:
    """The names of the signals that have come, of those that there are here and that nobody ignores (as `nohup` does)."""
    asked: set[str] = set()
    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in names)}

    def note(number: int, _: object) -> None:
        asked.add(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, before[number])  # a second one does not wait for the step

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
    except ValueError:  # not in the main thread, where signals do not come
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
