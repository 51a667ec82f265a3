"""A forged memory is refused when it is loaded, or it can be read on from and saved again."""

import json
import random

import pytest
import torch
from forging import forgeries, write
from models import VARIANTS
from test_memfile import saved

from remanence import Session
from remanence.io.tensors import describe, read_tensors
from remanence.runtime.errors import DivergedError


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_any_forgery(tmp_path, monkeypatch, variant, count):
    monkeypatch.setattr("remanence.io.files.flush", lambda path: None)  # the disk's part takes the most time
    subject, path = saved(tmp_path, variant)
    found = list(forgeries(path))
    refused = 0
    for what, tensors, header in random.Random(variant).sample(found, min(count, len(found))):
        write(tmp_path / "forged.mem", tensors, header)
        try:
            session = Session(subject.model).load(tmp_path / "forged.mem")
        except ValueError as error:
            assert not isinstance(error, UnicodeError) and "\n" not in str(error), what  # noqa: PT017
            refused += 1
            continue
        session.save(tmp_path / "again.mem")
        try:
            session.read("a few words")
        except DivergedError:
            continue
        session.save(tmp_path / "again.mem")
    assert refused


@pytest.mark.parametrize("variant", ["lmm", "mac", "window", "attention", "surprising tokens"])
@pytest.mark.parametrize("value", [1e300, -1e300, 1e38])
def test_numbers_that_the_model_cannot_hold(tmp_path, variant, value):
    subject, path = saved(tmp_path, variant)
    whole = read_tensors(path)
    names = [name for name, tensor in whole.tensors.items() if tensor.is_floating_point() and tensor.numel()]
    for name in names[:: max(1, len(names) // 4)]:
        one = whole.tensors[name].double()
        one.view(-1)[-1] = value
        tensors = {**whole.tensors, name: one}
        header = {**whole.metadata, "state": json.dumps({key: describe(x) for key, x in tensors.items()})}
        write(path, tensors, header)
        if value < 0 and name.rpartition(".")[2] in ("worth", "log_step", "log_keep", "log_momentum"):
            continue  # minus infinity is a number there
        with pytest.raises(
            ValueError, match=r"a\.mem: .*: expected (finite numbers, got 1 inf|numbers up to 1e\+15)"
        ):
            Session(subject.model).load(path)


@pytest.mark.parametrize("value", [2**48 + 1, 2**62, 2**63 - 1])
def test_more_tokens_than_can_be_read(tmp_path, value):
    subject, path = saved(tmp_path, "lmm")
    whole = read_tensors(path)
    tensors = {**whole.tensors, "position": torch.tensor([value])}
    write(path, tensors, {**whole.metadata, "tokens": json.dumps([value])})
    with pytest.raises(
        ValueError, match=r"a\.mem: position: expected at most 281,474,976,710,656 tokens read"
    ):
        Session(subject.model).load(path)


@pytest.mark.parametrize(("gate", "value"), [("log_keep", 1e6), ("log_step", 1e6), ("log_keep", 0.5)])
def test_gates_that_no_memory_has(tmp_path, gate, value):
    subject, path = saved(tmp_path, "lmm")
    whole = read_tensors(path)
    name = f"blocks.0.memory.gates.{gate}"
    write(path, {**whole.tensors, name: torch.full_like(whole.tensors[name], value)}, whole.metadata)
    with pytest.raises(ValueError, match=r"a\.mem: its parts do not agree .*\(Gates\)"):
        Session(subject.model).load(path)
