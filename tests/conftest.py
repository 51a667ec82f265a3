"""Tests run on the CPU, or on what REMANENCE_TEST_DEVICE names. One thread each: two workers share two cores."""

import os
from concurrent.futures import ThreadPoolExecutor

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


def pytest_collection_modifyitems(config, items):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    items[:] = [item for item in items if ("interpreted" in item.keywords) == interpreted]
    if not config.getoption("--slow"):
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
