"""Files that are replaced while they are read: a header and its tensors always come from the same file."""

import os
import shutil
import threading

import pytest
import torch
from models import config, model
from test_memfile import TEXT, session

from remanence import Model, Session, folder
from remanence.forecast import network
from remanence.forecast.config import ForecastConfig, NetworkConfig
from remanence.inference import memfile
from remanence.io.tensors import opened, read_header, read_tensors, write_tensors
from remanence.testing import assert_close


def replaced_after(monkeypatch, owner, name, path, other):
    """As if another process put `other` in the place of `path` after the first call of a function."""
    original, done = getattr(owner, name), []

    def call(*args, **kwargs):
        found = original(*args, **kwargs)
        if not done:
            done.append(shutil.copy(other, other.with_suffix(".copy")))
            os.replace(done[0], path)
        return found

    monkeypatch.setattr(owner, name, call)
    return done


@pytest.fixture
def pair(tmp_path):
    """Two models of one configuration, and a memory of each."""
    models = []
    for seed in range(2):
        subject = session("lmm")
        with torch.no_grad():
            subject.model.embed.weight.mul_(1 + seed)
        subject.read(TEXT)
        subject.save(tmp_path / f"{seed}.mem")
        models.append(subject)
    return models


def test_a_memory_replaced_between_header_and_tensors(tmp_path, pair, monkeypatch):
    done = replaced_after(monkeypatch, memfile, "read_header", tmp_path / "0.mem", tmp_path / "1.mem")
    assert_close(Session(pair[0].model).load(tmp_path / "0.mem").state, pair[0].state, 0.0)
    assert done, "nothing was replaced"
    with pytest.raises(ValueError, match="with other weights"):
        Session(pair[0].model).load(tmp_path / "0.mem")


def test_looking_into_a_memory_that_is_replaced(tmp_path, pair, monkeypatch):
    assert replaced_after(monkeypatch, memfile, "read_header", tmp_path / "0.mem", tmp_path / "1.mem") == []
    header, tensors = memfile.read_file(tmp_path / "0.mem")
    assert header["fingerprint"] == list(memfile.fingerprint(pair[0].model))
    for name, tensor in memfile.named_tensors(pair[0].state):
        assert torch.equal(tensors[name], tensor), name


def test_many_loads_beside_a_writer(tmp_path, pair):
    path, stop = tmp_path / "a.mem", threading.Event()
    shutil.copy(tmp_path / "0.mem", path)

    def write():
        turn = 0
        while not stop.is_set():
            turn = 1 - turn
            shutil.copy(tmp_path / f"{turn}.mem", tmp_path / "next.mem")
            os.replace(tmp_path / "next.mem", path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        accepted = 0
        for _ in range(60):
            try:
                state = memfile.load(path, pair[0].model)
            except ValueError as error:
                if "with other weights" not in str(error):
                    raise
                continue
            accepted += 1
            assert_close(state, pair[0].state, 0.0)
        assert 0 < accepted < 60
    finally:
        stop.set()
        writer.join()


def test_loads_beside_a_session_that_saves(tmp_path, pair):
    """Every load succeeds, and is one of the states that were saved."""
    path, stop, subject = tmp_path / "a.mem", threading.Event(), pair[0]
    subject.save(path)
    own = Session(subject.model)
    saved = {len(TEXT): subject.state}

    def write():
        while not stop.is_set():
            own.read("more ")
            saved[own.tokens] = own.state
            own.save(path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(25):
            state = memfile.load(path, subject.model)
            assert_close(state, saved[int(state.position)], 0.0)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("mapped", [None, 0])
def test_tensors_outlive_the_file_under_their_name(tmp_path, mapped):
    first = {"a": torch.arange(300.0), "b": torch.ones(3, 4, dtype=torch.bool), "c": torch.zeros(2, 0)}
    first |= {"d": torch.randn(5, 3).bfloat16(), "e": torch.tensor([-1, 2**40])}
    write_tensors(tmp_path / "x", first, {"word": "first"})
    with opened(tmp_path / "x") as file:
        write_tensors(tmp_path / "x", {"a": torch.zeros(300)}, {"word": "second"})
        assert read_header(file).metadata["word"] == "first"
        stored = read_tensors(file, mapped)
    write_tensors(tmp_path / "x", {"a": torch.ones(300)}, {"word": "third"})
    assert stored.metadata == {"word": "first"} and stored.tensors.keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(stored.tensors[name], tensor) and stored.tensors[name].dtype == tensor.dtype
    stored.tensors["a"].zero_()  # a copy: it does not reach the file
    assert torch.equal(read_tensors(tmp_path / "x").tensors["a"], torch.ones(300))


@pytest.mark.parametrize("name", ["read_header", "read_json"])
def test_a_models_folder_that_is_replaced(tmp_path, monkeypatch, name):
    """Another model of the same shapes is saved while a folder is loaded."""
    models = [model("lmm", torch.float32, rotary=rotary) for rotary in (10_000.0, 500.0)]
    with torch.no_grad():
        models[1].embed.weight.mul_(2)
    for place, each in enumerate(models):
        each.save(tmp_path / str(place))
    original, done = getattr(folder, name), []

    def call(*args, **kwargs):
        found = original(*args, **kwargs)
        if not done:
            done.append(models[1].save(tmp_path / "0"))
        return found

    monkeypatch.setattr(folder, name, call)
    if name == "read_json":  # the weights are the other's: they say so
        with pytest.raises(ValueError, match="saved with another configuration"):
            Model.load(tmp_path / "0")
        return
    loaded = Model.load(tmp_path / "0")
    assert loaded.config == models[0].config
    assert torch.equal(loaded.embed.weight, models[0].embed.weight)


def test_a_forecasting_network_that_is_replaced(tmp_path, monkeypatch):
    forecast = ForecastConfig(network="dlinear")
    shape = NetworkConfig(forecast=forecast, model=config("lmm"), lookback=8, horizon=4, names=("x",))
    made = [network.make_network(shape) for _ in range(2)]
    with torch.no_grad():
        next(made[1].parameters()).add_(1)
    for place, each in enumerate(made):
        each.save(tmp_path / str(place))
    weights = [tmp_path / str(place) / network.WEIGHTS for place in range(2)]
    replaced_after(monkeypatch, network, "read_header", *weights)
    loaded = network.load_network(tmp_path / "0")
    for (name, one), (_, other) in zip(made[0].named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
