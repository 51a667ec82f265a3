"""Rows that begin elsewhere: with what another row's memory held, or with noise of its size; nothing else of another
text.
"""

import itertools
import shutil

import pytest
import torch
from runs import config, losses, weights

from remanence import Model, ModelConfig
from remanence.model import memories
from remanence.testing import assert_close
from remanence.train import DataConfig, engine, fit, override, run_config
from remanence.train.carry import carry_in
from remanence.train.checkpoint import checkpoints
from remanence.train.distributed import ProcessGroup
from remanence.train.initial_state import make_initial_state
from remanence.train.sources import SOURCES

HERE = ProcessGroup(torch.device("cpu"))
NOISE = ("--initial_state=noise", "--initial_state_share=0.75")
KINDS = ("recall", "packed", "documents", "carried")


def setting(kind, shards, variant="lmm", **fields):
    own = {"pairs": 4} if kind == "recall" else {"path": shards}
    data = DataConfig(kind="documents" if kind == "carried" else kind, length=24, **own)
    return config(variant, data=data, carry=kind == "carried", **fields)


def read(model, given, number, state=None):
    batch = SOURCES[given.data.kind](given, given.batch, 0, 1).step(number)
    with torch.no_grad():
        return batch, model.trace(batch.tokens, state, mask=batch.mask, offsets=batch.offsets).state


def begun(model, batch):
    return model.start(batch.tokens.shape[0] if batch.offsets is None else len(batch.offsets) - 1)


@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "lmm", "gated_delta"])
def test_rows_pass_their_memories_in_pairs_and_nothing_else(shards, variant):
    given = setting("recall", shards, variant, initial_state="neighbor", initial_state_share=1.0)
    model, begin = Model(given.model), make_initial_state(given, HERE)
    batch, before = read(model, given, 0)
    fresh = model.start(4)
    assert begin.start(fresh, batch, 0) is fresh, "nothing was read yet"
    begin.after_step(before, batch)
    state = begin.start(fresh, batch, 1)
    for new, old, plain in zip(memories(state), memories(before), memories(fresh), strict=True):
        assert_close(new.layers, tuple(layer[[1, 0, 3, 2]] for layer in old.layers), 0.0)
        assert not any(torch.equal(a, b) for a, b in zip(new.weights, plain.weights, strict=True))
        assert_close(new._replace(layers=plain.layers), plain, 0.0)
    for block, plain in zip(state.blocks, fresh.blocks, strict=True):
        if variant == "mac":
            assert_close(block.weights, block.memory.memory.weights, 0.0)
            block = block._replace(memory=plain.memory, weights=plain.weights)
        elif variant in ("mag", "mal"):
            block = block._replace(memory=block.memory._replace(memory=plain.memory.memory))
        else:
            block = block._replace(memory=plain.memory)
        assert_close(block, plain, 0.0)
    assert state.position.tolist() == [0] * 4


def test_packed_documents_begin_with_what_the_row_beside_ended_with(shards):
    given = setting("packed", shards, initial_state="neighbor", initial_state_share=1.0)
    model, begin = Model(given.model), make_initial_state(given, HERE)
    batch, before = read(model, given, 0)
    begin.after_step(before, batch)
    ends = [batch.offsets.index(24 * (row + 1)) - 1 for row in range(4)]
    later, _ = read(model, given, 1)
    rows = [place // 24 for place in later.offsets[:-1]]
    assert len(rows) > 4, "several documents in a row"
    expected = [ends[row ^ 1] for row in rows]
    state = begin.start(begun(model, later), later, 1)
    assert_close(
        memories(state)[0].layers, tuple(layer[expected] for layer in memories(before)[0].layers), 0.0
    )


def test_a_memory_that_has_diverged_is_not_passed(shards):
    given = setting("recall", shards, initial_state="neighbor", initial_state_share=1.0)
    given = override(
        given, {"model.memory.net": "titans", "model.memory.chunk": "4"}
    )  # whose start is learned
    model, begin = Model(given.model), make_initial_state(given, HERE)
    batch, before = read(model, given, 0)
    memory = memories(before)[0]
    memory.layers[0][0] = float("nan")
    memory.diverged[0] = True
    begin.after_step(before, batch)
    fresh = model.start(4)
    state = begin.start(fresh, batch, 1)
    assert_close(memories(state)[0].rows([1]), memories(fresh)[0].rows([1]), 0.0)
    memories(state)[0].layers[0].sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["recall", "packed"])
def test_noise_is_as_large_as_what_memories_hold(shards, kind):
    given = setting(kind, shards, initial_state="noise", initial_state_share=1.0, batch=32)
    given = override(given, {"model.memory.expansion": "4.0"})
    model, begin = Model(given.model), make_initial_state(given, HERE)
    batch, before = read(model, given, 0)
    assert memories(begin.start(begun(model, batch), batch, 0))[0].position.any().item() is False
    for _ in range(3):
        begin.after_step(before, batch)
    state = begin.start(begun(model, batch), batch, 1)
    ends = begin.last_documents(batch)
    assert len(ends) == 32
    for new, old in zip(memories(state)[0].layers, memories(before)[0].layers, strict=True):
        size, true = new.square().mean((0, 3, 4)), old[ends].square().mean((0, 3, 4))
        torch.testing.assert_close(size, true, rtol=0.1, atol=0.0)
        assert new.mean().abs() < 0.05 * new.std()
    again = begin.start(begun(model, batch), batch, 1)
    assert_close(again, state, 0.0)
    assert not torch.equal(
        memories(begin.start(begun(model, batch), batch, 2))[0].layers[0], memories(state)[0].layers[0]
    )


def test_a_share_of_the_documents_begins_elsewhere(shards):
    given = setting("recall", shards, initial_state="neighbor", initial_state_share=0.25)
    begin = make_initial_state(given, HERE)
    batch = SOURCES["recall"](given, 4, 0, 1).step(0)
    drawn = [seed is not None for number in range(500) for seed in begin.seeds(batch, number)]
    assert 0.2 < sum(drawn) / len(drawn) < 0.3
    halves = [make_initial_state(given, ProcessGroup(torch.device("cpu"), rank, 2)) for rank in (0, 1)]
    for number in range(20):
        together = [
            seed for half in halves for seed in half.seeds(batch._replace(tokens=batch.tokens[:2]), number)
        ]
        assert together == begin.seeds(batch, number), "whatever the number of processes"


def test_carried_rows_go_on_and_begin_elsewhere_only_with_a_document(shards):
    given = setting("carried", shards, initial_state="neighbor", initial_state_share=1.0)
    model, begin = Model(given.model), make_initial_state(given, HERE)
    state, met = None, 0
    source = SOURCES["documents"](given, 4, 0, 1)
    for number in range(6):
        batch = source.step(number)
        entered = carry_in(model, state, batch, begin, number)
        for row, anew in enumerate(batch.begins.tolist() if state is not None else ()):
            origin = state.rows([row ^ 1 if anew else row])
            assert_close(memories(entered)[0].rows([row]).layers, memories(origin)[0].layers, 0.0)
            assert int(entered.position[row]) == (0 if anew else int(state.position[row]))
            met += anew
        with torch.no_grad():
            state = model.trace(batch.tokens, entered, mask=batch.mask).state
    assert met > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "begin"), list(itertools.product(KINDS, ("neighbor", "noise"))))
def test_resuming_is_not_stopping(tmp_path, shards, kind, begin):
    whole, part = tmp_path / "whole", tmp_path / "part"
    given = setting(kind, shards, "mac" if kind != "packed" else "mag", initial_state=begin, keep=9, steps=9)
    given = override(given, {"accumulate": "2"}) if kind == "recall" else given
    fit(given, whole)
    fit(override(given, {"initial_state": "fresh"}), tmp_path / "fresh")
    assert losses(whole) != losses(tmp_path / "fresh")
    shutil.copytree(whole, part)
    for later in checkpoints(part / "checkpoints")[1:]:
        shutil.rmtree(later)
    shutil.rmtree(part / "model")
    fit(None, part, resume=True)
    assert losses(part) == losses(whole)
    assert_close(weights(part), weights(whole), 0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("begin", ["neighbor", "noise"])
def test_a_skipped_step_leaves_nothing(tmp_path, shards, begin, monkeypatch):
    """Neither to pass nor to be as large as; and a run that goes on after it goes on as it would have."""
    given = setting("recall", shards, initial_state=begin, steps=6, save_every=1, keep=9)
    real = engine.take_step

    def stumbles(model, *rest, **more):
        if rest[4] == 2:
            model.logits = lambda hidden: Model.logits(model, hidden) * float("nan")
        step = real(model, *rest, **more)
        model.__dict__.pop("logits", None)
        return step

    monkeypatch.setattr(engine, "take_step", stumbles)
    fit(given, tmp_path / "run")
    before = losses(tmp_path / "run")
    assert before[3] is None and all(before[step] is not None for step in (1, 2, 4, 5, 6))
    for later in checkpoints(tmp_path / "run" / "checkpoints")[3:]:
        shutil.rmtree(later)
    shutil.rmtree(tmp_path / "run" / "model")
    fit(None, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == before


def test_the_command_line_knows_it(tmp_path, command):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from runs import config as recipe\n")
    command(
        "train",
        recipe,
        "--out",
        tmp_path / "run",
        "--steps=2",
        "--initial_state=noise",
        "--initial_state_share=0.75",
    )
    found = run_config(tmp_path / "run")
    assert (found.initial_state, found.initial_state_share) == ("noise", 0.75)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"initial_state": "neighbour"},
            "initial_state: expected one of fresh, neighbor, noise, got 'neighbour'; did you mean 'neighbor'",
        ),
        ({"initial_state_share": "1.5"}, "initial_state_share: expected a number from 0 to 1, got 1.5"),
        (
            {"initial_state": "noise", "model.pattern": "window,knn"},
            r"initial_state: expected 'fresh', as .* have no neural memory, got 'noise'",
        ),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        override(config(), changes)


def test_rows_pass_in_pairs_or_not_at_all(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"initial_state: expected an even number of rows, .* got batch / \(accumulate x processes\) = 1",
    ):
        fit(config(initial_state="neighbor", batch=2, accumulate=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_of_one_kind_of_mixer_and_another(shards):
    """The order of the memories is that of the layers, whatever lies between them."""
    sizes = {
        "vocab_size": 257,
        "dim": 16,
        "num_layers": 4,
        "heads": 2,
        "window": 8,
        "segment": 8,
        "persistent": 2,
    }
    made = ModelConfig(
        **sizes, pattern=("mac", "attention", "lmm", "knn"), memory={"heads": 2, "chunk": 4, "expansion": 1.0}
    )
    given = config(model=made, initial_state="neighbor", initial_state_share=1.0)
    model, begin = Model(made), make_initial_state(given, HERE)
    batch, before = read(model, given, 0)
    begin.after_step(before, batch)
    state = begin.start(model.start(4), batch, 1)
    for new, old in zip(memories(state), memories(before), strict=True):
        assert_close(new.layers, tuple(layer[[1, 0, 3, 2]] for layer in old.layers), 0.0)
    model.trace(batch.tokens, state)
