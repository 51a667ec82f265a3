"""Tests run on the CPU, or on what REMANENCE_TEST_DEVICE names. One thread each: two workers share two cores."""

import importlib
import os
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from remanence import cli

torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steady")

DEVICE = os.environ.get("REMANENCE_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture
def aside():
    """A thread of its own, which does not have the tests' device mode: the compiler does not see through that."""
    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture
def full_of_nan(monkeypatch):
    """Memory as allocated: an element that no kernel writes must show."""
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)

        def filled(*args, made=made, **kwargs):
            x = made(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, filled)


@pytest.fixture
def command(capsys):
    """``remanence ...`` in this process: what it said, after checking its exit code; a wrong argument is one line of
    error.
    """

    def call(*arguments, code=0):
        capsys.readouterr()
        came = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            came = stop.code
        out, err = capsys.readouterr()
        assert came == code, err or out
        if code == 2:
            assert err.count("\n") == 1 and err.startswith("remanence: error: "), err
        return err if code else out

    return call


@pytest.fixture
def experiment(monkeypatch, capsys):
    """``python -m experiments...`` in this process, which has imported torch already: what it printed."""

    def call(name, *arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.chdir(Path(__file__).parent.parent)  # for the processes that it starts
        importlib.import_module(f"experiments.{name}").main()
        return capsys.readouterr().out

    return call


TIERS = ("fast", "slow", "exhaustive")


def pytest_addoption(parser):
    tiers = (
        "fast (make test), slow (with it: make test-all), exhaustive (make test-exhaustive), fast,slow or all"
    )
    parser.addoption("--tier", default="fast", help=tiers)


def chosen_tiers(config):
    given = config.getoption("--tier")
    chosen = TIERS if given == "all" else tuple(given.split(","))
    if not set(chosen) <= set(TIERS):
        raise pytest.UsageError(f"--tier: expected all or some of {','.join(TIERS)}, got {given}")
    return chosen


def pytest_collection_modifyitems(config, items):
    """Keep the tests of the chosen tier. A test that is named as `file::test` runs in every tier."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kept = [item for item in items if ("interpreted" in item.keywords) == interpreted]
    chosen = chosen_tiers(config)
    if chosen != TIERS and not any("::" in argument for argument in config.args):
        sampled = sample(kept)
        kept = [item for item in kept if tier(item, sampled) in chosen]
    dropped = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = kept


def tier(item, sampled):
    if item.get_closest_marker("exhaustive"):
        return "exhaustive"
    slow = item.get_closest_marker("slow") or (item.get_closest_marker("sample") and item not in sampled)
    return "slow" if slow else "fast"


def sample(items):
    """The cases that the fast tier runs of the tests marked `sample`; a test without parameters is one case."""
    tests = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark and not (item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")):
            tests.setdefault((item.parent.nodeid, item.originalname, *mark.args), []).append(item)
    return {case for (*_, count), cases in tests.items() for case in spread(cases, count)}


def spread(cases, count):
    """A few cases with many different values of their parameters: one that depends on the test's name, so that tests
    with the same parameters share them out; then each time the one with the most new values, far from those chosen.
    """
    values = [set(case.callspec.indices.items()) if hasattr(case, "callspec") else set() for case in cases]
    chosen = [zlib.crc32(cases[0].originalname.encode()) % len(cases)]
    while len(chosen) < min(count, len(cases)):
        seen = set().union(*(values[index] for index in chosen))
        rank = {
            index: (len(values[index] - seen), min(abs(index - other) for other in chosen))
            for index in range(len(cases))
            if index not in chosen
        }
        chosen.append(max(rank, key=rank.get))
    return [cases[index] for index in chosen]
