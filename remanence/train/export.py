"""Export of a run's model to a model folder, and the record of its training data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from remanence.inference import memfile
from remanence.io.files import add_digest, read_json, replacing_folder, write_json
from remanence.io.outputs import make_folder
from remanence.model import State
from remanence.runtime.positions import positions_of
from remanence.tokenizers.tokens import REACH, TOKENIZER, TRAINED, load_tokenizer
from remanence.train import checkpoint
from remanence.train.card import write_card
from remanence.train.checkpoint import Progress
from remanence.train.config import TrainConfig
from remanence.train.trainable import TrainableModel


def run_config(run: str | Path) -> TrainConfig:
    """Return the config of the run in a folder."""
    path = Path(run) / "config.json"
    if not path.is_file():
        raise ValueError(f"out: expected a run, with its config.json, got {run}")
    data = read_json(path)
    if "model_type" in data:
        hint = "it is ready to use, or to copy, and needs no export"
        raise ValueError(f"run: expected a training run, got the model {run}; {hint}")
    try:
        return TrainConfig.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_model(model: TrainableModel, run: Path, folder: Path, trained: Mapping[str, object]) -> None:
    """Save a model, the tokenizer of its data and the record `trained`.

    The folder is then ready for inference.
    """
    model.save(folder)
    if (run / "tokenizer").is_dir():
        load_tokenizer(run / "tokenizer").save(folder)
        trained = {**trained, TOKENIZER: True}
    write_json(folder / TRAINED, add_digest(trained))


def trained_on(progress: Progress, config: TrainConfig) -> dict[str, object]:
    """Return the training record stored with a model: the tokens and steps, and the kind of data."""
    data = config.data
    trained = {"tokens": progress.tokens, "steps": progress.step, "data": data.kind}
    reach = {REACH: reached(progress, config)} if data.causal_lm else {}
    return {**trained, **reach, **{name: getattr(data, name) for name in data.recorded}}


def reached(progress: Progress, config: TrainConfig) -> int:
    """Return the largest number of consecutive tokens that the memory of a row can have read since its start."""
    carried = config.carry or config.initial_state != "fresh"
    longest = config.data.max_carried_steps or progress.step
    rows = max((config.data.length, *config.data.stages))
    return rows * max(1, min(progress.step, longest) if carried else 1)


def export(run: str | Path, out: str | Path, memory: str | Path | None = None, row: int = 0) -> Path:
    """Write the model of a run to a folder, for `Model.load` and Hugging Face, together with a model card.

    The model is the finished one, or that of the last checkpoint; the path of its source is returned. If
    `memory` is given, the memory that row `row` of the batch had at the end is written to that file; this
    needs a run with ``carry``.
    """
    run, out = Path(run), Path(out)
    config = run_config(run)
    carried = None if memory is None else _carried(run, config, row)
    finished = (run / "model" / "config.json").is_file()
    found = [run / "model"] if finished else checkpoint.checkpoints(run / "checkpoints")[-1:]
    if not found:
        raise ValueError(f"run: expected a model or a checkpoint in {run}, got neither")
    if memory is not None:
        make_folder("--memory-file", Path(memory))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"out: expected a new or empty folder, got {out}, which is not; nothing is ever overwritten"
        )
    model = checkpoint.load_model(found[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(out) as temporary:
        trained = _trained(found[0], config)
        save_model(model, run, temporary, trained)
        write_card(model, temporary, out.resolve().name, trained, config.data)
        if carried is not None and memory is not None:
            memfile.save(memory, model, carried)
    return found[0]


def _trained(folder: Path, config: TrainConfig) -> dict[str, object]:
    """Return the training record of a finished model or a checkpoint."""
    if (folder / TRAINED).is_file():
        return read_json(folder / TRAINED)
    return trained_on(checkpoint.read_progress(folder), config)


def _carried(run: Path, config: TrainConfig, row: int) -> State:
    """Return the state that one row of the batch carried at the end of a run.

    Raise an error if there is none.
    """
    found = checkpoint.checkpoints(run / "checkpoints")
    state = checkpoint.load_carried(found[-1]) if config.carry and found else None
    if state is None:
        raise ValueError(
            f"memory: expected a run that carries its memories (--carry=true), got {run}, which does not"
        )
    rows = len(state.position)
    if not 0 <= row < rows:
        raise ValueError(f"row: expected from 0 to {rows - 1}, a row of the run's batch, got {row}")
    inside = [index for index, position in enumerate(positions_of(state.position)) if position]
    if row not in inside:
        others = (
            f"one of {', '.join(map(str, inside))}"
            if inside
            else "one more step, as no row is inside a document"
        )
        raise ValueError(f"row: expected {others}, got {row}, whose document ended with the run's last step")
    return state.rows([row])
