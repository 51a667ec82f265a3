"""Checkpoints of a run: folders of safetensors and JSON files. A checkpoint is either complete or absent.

A single process writes a model folder with the state of the optimizer in it. Several processes write one
shard each, in the format of torch's distributed checkpoints with safetensors. Any number of processes can
load either format. ``progress.json`` is written last and lists all files with their digests. Each safetensors
file also holds its own digest, except for the shards written by torch.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from remanence.attached import folder as attached
from remanence.folder import read_config
from remanence.inference import memfile
from remanence.io.files import DIGEST, add_digest, file_digest, flush, read_json, write_json
from remanence.io.migrations import current_name
from remanence.io.tensors import read_header, read_tensors, write_tensors
from remanence.model import Model, State
from remanence.runtime.errors import OtherConfigError, first_line
from remanence.runtime.overrides import differences
from remanence.train.config import TrainConfig
from remanence.train.distributed import ProcessGroup, is_sharded, shard_like
from remanence.train.initial_state import InitialState
from remanence.train.trainable import ModelDescription, TrainableModel
from remanence.verticals import model_loader

PARTS = "parts"
"""The subfolder of a checkpoint that holds the shards of several processes."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the two moments in the state of AdamW."""


class Progress(NamedTuple):
    """The progress of a run: the next step, the tokens read so far, and the skipped steps, in total and in a
    row.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


def save(
    folder: Path,
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    carried: State | None,
    config: TrainConfig,
    process_group: ProcessGroup,
    initial_state: InitialState | None = None,
) -> None:
    """Write a checkpoint under a temporary name and rename it.

    Then remove all but the last `config.keep` ones.
    """
    target, temporary = folder / f"{progress.step:08d}", folder / f".{progress.step:08d}.tmp"

    def make_room() -> None:
        """Remove unfinished checkpoints, and create the temporary folder with the model's config."""
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.tmp"):
            if left.is_dir():
                shutil.rmtree(left)
        if target.exists() and target not in checkpoints(folder):  # it is incomplete
            shutil.rmtree(target)
        if not target.exists():
            temporary.mkdir()
            write_json(temporary / "config.json", model.describe())

    def finish() -> None:
        """Write progress.json, rename the temporary folder, and remove old checkpoints."""
        if not target.exists():
            write_tensors(temporary / "random.safetensors", {"cpu": torch.get_rng_state()}, {})
            shards = _shard_digests(temporary, flushed=True)
            files = {path.name: _digest(path) for path in sorted(temporary.iterdir()) if path.is_file()}
            facts = {"files": files, "shards": shards, "config": config.to_dict()}
            write_json(temporary / "progress.json", add_digest({**progress._asdict(), **facts}))
            os.replace(temporary, target)
            flush(folder)
        for old in checkpoints(folder)[: -config.keep]:  # also those that a killed run left
            # Renamed first, so that a partly removed folder is not taken for a complete checkpoint.
            shutil.rmtree(old.rename(folder / f".{old.name}.tmp"))

    try:
        process_group.run_on_rank0(make_room)
        if not target.exists():
            process_group.run_on_all(
                lambda: _write(temporary, model, optimizer, carried, process_group, initial_state)
            )
        process_group.run_on_rank0(finish)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(
    temporary: Path,
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    carried: State | None,
    process_group: ProcessGroup,
    initial_state: InitialState | None,
) -> None:
    """Write the weights, the optimizer's moments and the states of this process to the temporary folder."""
    if not is_sharded(model):
        if process_group.is_first:
            model.save(temporary)
            write_tensors(temporary / "optimizer.safetensors", _moments(model, optimizer), {})
    else:
        import torch.distributed.checkpoint as dcp

        writer = dcp.HuggingFaceStorageWriter(str(temporary / PARTS), save_distributed=True)
        with _one_line(temporary, OSError):
            dcp.save({**_weights(model), **_moments(model, optimizer)}, storage_writer=writer)
    if carried is not None:
        # Parts of a state may share memory, which safetensors refuses, so they are copied. Large stores never do.
        tensors = {
            name: tensor if memfile.is_lazy(name, tensor.nbytes) else tensor.clone()
            for name, tensor in memfile.named_tensors(carried)
        }
        write_tensors(temporary / f"carried-{process_group.rank:05d}.safetensors", tensors, {})
    if initial_state is not None and (held := initial_state.tensors()):
        write_tensors(
            temporary / f"{initial_state.file_prefix}-{process_group.rank:05d}.safetensors", held, {}
        )


def _digest(path: Path) -> str:
    """Return the digest stored in the header of a safetensors file, or else the digest of the file's bytes."""
    stored = read_header(path).metadata.get(DIGEST) if path.suffix == ".safetensors" else None
    return stored or file_digest(path)


def _shard_digests(checkpoint: Path, *, flushed: bool = False) -> dict[str, str]:
    """Return the digests of the shards written by torch, by file name.

    With `flushed`, sync them to disk first.
    """
    folder = checkpoint / PARTS
    paths = sorted(folder.iterdir()) if folder.is_dir() else []

    def digest(path: Path) -> str:
        """Return the digest of a shard."""
        if flushed:
            flush(path)
        return file_digest(path)

    with ThreadPoolExecutor(8) as pool:
        return {path.name: found for path, found in zip(paths, pool.map(digest, paths), strict=True)}


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if (path / "progress.json").is_file())


def load(
    path: Path,
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    process_group: ProcessGroup,
    initial_state: InitialState | None = None,
    *,
    stored_config: Callable[[Path, TrainableModel], ModelDescription] = lambda path, _: read_config(path),
) -> tuple[Progress, State | None]:
    """Load weights, moments and the random number state in place. Return the progress and the carried state
    (or None).

    `stored_config` reads the config of the model in the checkpoint, which must equal ``model.config``.
    """
    progress, facts = _progress(path)
    process_group.run_on_rank0(lambda: _check_complete(path, facts))
    theirs = stored_config(path, model)
    if theirs != model.config:
        changed = ", ".join(name for name, *_ in differences(theirs.to_dict(), model.config.to_dict()))
        raise OtherConfigError(
            f"{path}: expected a checkpoint of the run's own model, got one of another configuration: undo the change "
            f"of {changed} in config.json"
        )
    taken = progress.step - progress.skipped
    parameters = {name: each for name, each in model.saved_parameters() if taken and each.requires_grad}
    moments = {
        f"{key}.{name}": torch.zeros_like(parameter.detach())
        for name, parameter in parameters.items()
        for key in MOMENTS
    }
    _read(path, {**_weights(model), **moments}, process_group)
    for name, parameter in parameters.items():
        own = {key: moments[f"{key}.{name}"] for key in MOMENTS}
        fused = parameter.device.type == "cuda"  # fused AdamW keeps the step count on the device
        count = torch.tensor(float(taken), device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": count, **own}
    with _fitting(path / "random.safetensors"):
        torch.set_rng_state(read_tensors(path / "random.safetensors").tensors["cpu"])
    if initial_state is not None and (
        parts := sorted(path.glob(f"{initial_state.file_prefix}-*.safetensors"))
    ):
        with _fitting(parts[0]):
            initial_state.load([read_tensors(part).tensors for part in parts], process_group.device)
    return progress, _carried(path, model, process_group)


def read_progress(path: Path) -> Progress:
    """Return the progress of the run at a checkpoint."""
    return _progress(path)[0]


def saved_config(path: Path) -> Mapping[str, object] | None:
    """Return the run's config stored in a checkpoint, as plain data.

    None for checkpoints of early versions.
    """
    return _progress(path)[1].get("config")


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Turn errors about missing or unexpected tensors into a one-line ValueError that names the file."""
    try:
        yield
    except (KeyError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: does not hold what this run needs ({first_line(error)})") from None


def _check_complete(path: Path, facts: dict[str, Any]) -> None:
    """Raise an error if files of a checkpoint are missing or altered."""
    for name, digest in facts.get("files", {}).items():
        if not (path / name).is_file():
            raise ValueError(f"{path / name}: no such file, which the checkpoint was written with")
        if _digest(path / name) != digest:
            raise ValueError(f"{path / name}: altered or damaged: it is not the file that was written")
    if (shards := facts.get("shards")) and _shard_digests(path) != shards:
        raise ValueError(f"{path / PARTS}: altered or damaged: its files are not those that were written")


def load_model(path: Path) -> Any:
    """Load a model with all its weights, from a checkpoint of either format or a model folder."""
    if (path / "progress.json").is_file():
        _check_complete(path, _progress(path)[1])
    if (loader := model_loader(path)) is not None:
        return loader(path)
    if not (path / PARTS).is_dir():
        return attached.load_model(path)
    with torch.device("meta"):
        model = Model(read_config(path))
    model = model.to_empty(device="cpu")
    _read(path, _weights(model), ProcessGroup(torch.device("cpu")))
    return model


def load_carried(path: Path) -> State | None:
    """Load the carried state of all rows of a checkpoint. None if rows carried no state."""
    return _carried(path, load_model(path), ProcessGroup(torch.device("cpu")))


def _read(path: Path, into: dict[str, Tensor], process_group: ProcessGroup) -> None:
    """Fill the tensors of `into` in place from a checkpoint that any number of processes wrote."""
    if (path / PARTS).is_dir():
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if there is no process group; none is needed
            with _one_line(path, ValueError):
                reader = dcp.HuggingFaceStorageReader(str(path / PARTS))
                stored = {current_name(name): name for name in reader.read_metadata().state_dict_metadata}
                into = {stored.get(name, name): tensor for name, tensor in into.items()}
                dcp.load(into, storage_reader=reader, no_dist=process_group.size == 1)
        return
    parts = (
        read_tensors(path / name, mapped=0).tensors for name in ("model.safetensors", "optimizer.safetensors")
    )
    # The tensors are memory-mapped, and copied to their destination below.
    found = {current_name(name): tensor for part in parts for name, tensor in part.items()}
    for name, tensor in into.items():
        if name not in found or found[name].shape != tensor.shape:
            shape = list(found[name].shape) if name in found else "none"
            raise ValueError(f"{path}: {name}: expected a tensor {list(tensor.shape)}, got {shape}")
        tensor.copy_(shard_like(found[name], tensor))


@contextmanager
def _one_line(path: Path, kind: type[Exception]) -> Iterator[None]:
    """Turn errors of torch's distributed checkpoints, which are pages long, into a one-line error of type
    `kind`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [cause[0] if isinstance(cause, tuple) else cause for cause in error.failures.values()]
        raise kind(f"{path}: {first_line(causes[0])}") from None
    except (AssertionError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise kind(f"{path}: {first_line(error)}") from None


def _progress(path: Path) -> tuple[Progress, dict[str, Any]]:
    """Return the progress of a run, and the other entries of progress.json (files, shards, config)."""
    facts = read_json(path / "progress.json")
    found = {name: facts.pop(name, None) for name in Progress._fields}
    if any(type(value) is not int or value < 0 for value in found.values()):
        raise ValueError(
            f"{path / 'progress.json'}: expected integers {', '.join(Progress._fields)}, got {found}"
        )
    kinds = {"files": dict, "shards": dict, "config": dict}
    if any(not isinstance(value, kinds.get(name, str)) for name, value in facts.items()):
        raise ValueError(f"{path / 'progress.json'}: expected {', '.join(kinds)}, got {', '.join(facts)}")
    return Progress(**found), facts


def _weights(model: TrainableModel) -> dict[str, Tensor]:
    """Return the saved parameters by their name in the checkpoint, which starts with ``model.``."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.saved_parameters()}


def _moments(model: TrainableModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the moments of AdamW by their name in the checkpoint. Empty before the first step."""
    named: dict[str, Tensor] = {}
    for name, parameter in model.saved_parameters():
        state: dict[str, Tensor] = optimizer.state.get(parameter, {})
        named |= {f"{key}.{name}": state[key] for key in MOMENTS if key in state}
    return named


def _carried(path: Path, model: TrainableModel, process_group: ProcessGroup) -> State | None:
    """Load the carried state of this process's rows.

    Any number of processes may have written it. None if absent.
    """
    parts = sorted(path.glob("carried-*.safetensors"))
    if not parts:
        return None
    template, states = model.start(1), []
    for part in parts:
        with _fitting(part):
            tensors = read_tensors(part).tensors
            states.append(memfile.assemble_state(template, tensors, template.position.device))
    rows = State.concat(states)
    own = len(rows.position) // process_group.size
    return rows.rows(slice(process_group.rank * own, (process_group.rank + 1) * own))
