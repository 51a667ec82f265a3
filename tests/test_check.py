"""``remanence check``: modules that keep the laws, and modules that break each of them by one line."""

import json
import math
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from remanence import NeuralMemory, cli
from remanence.laws import LAWS, check
from remanence.testing import state_growth, tensors

EXAMPLE = "examples/check_your_module.py"


class Sum(nn.Module):
    """A decaying sum of projected tokens, and the forms of it below that each break a law."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.decay, self.project = decay, nn.Linear(4, 4)

    def add(self, total, new):
        return self.decay * total + new

    def start(self, x):
        return torch.zeros_like(x[:, 0])

    def inputs(self, x):
        return self.project(x)

    def forward(self, x, state=None):
        total, answers = self.start(x) if state is None else state, []
        for new in self.inputs(x).unbind(1):
            total = self.add(total, new)
            answers.append(total)
        return torch.stack(answers, 1), total

    def reference(self, x, state=None):
        total, answers = torch.zeros_like(x[:, 0]) if state is None else state, []
        for t in range(x.shape[1]):
            total = self.decay * total + self.project(x[:, t])
            answers.append(total)
        return torch.stack(answers, 1), total


class Centred(Sum):
    def inputs(self, x):
        return self.project(x - x.mean(1, keepdim=True))


class Batched(Sum):
    def inputs(self, x):
        return self.project(x - x.mean(0, keepdim=True))


class Forgetful(Sum):
    """Every call begins anew."""

    def forward(self, x, state=None):
        return super().forward(x)


class Noisy(Sum):
    def inputs(self, x):
        return self.project(x) + 1e-9 * torch.randn_like(x)


class InPlace(Sum):
    def forward(self, x, state=None):
        y, total = super().forward(x, state)
        if state is not None:
            state.add_(1.0)
        return y, total


class Remembering(Sum):
    """The state is in the module."""

    last = None

    def forward(self, x, state=None):
        y, total = super().forward(x, self.last)
        self.last = total.detach()
        return y, total


class Detached(Sum):
    def inputs(self, x):
        return self.project(x.detach())


class Function(Sum):
    """A state that cannot be saved."""

    def forward(self, x, state=None):
        y, total = super().forward(x, None if state is None else state[1])
        return y, (lambda: None, total)


class Wrong(Sum):
    def reference(self, x, state=None):
        return super().reference(1.001 * x, state)


def draw(tokens):
    return torch.randn(3, tokens, 4, dtype=torch.float64)


def found(module, **options):
    return {each.law: each for each in check(module.double(), draw, tokens=12, **options)}


def test_a_module_that_keeps_every_law():
    assert {law: each.holds for law, each in found(Sum()).items()} == dict.fromkeys(LAWS, True)


@pytest.mark.parametrize(
    ("kind", "broken", "message"),
    [
        (Centred, {"causality", "split", "reference"}, "not causal: changing token"),
        (Batched, {"rows", "reference"}, "rows not isolated: changing row 0"),
        (Forgetful, {"split"}, "outputs of calls [1, 11] against the whole[0]: apart by"),
        (Noisy, {"determinism"}, "two equal calls gave different results"),
        (InPlace, {"determinism"}, "forward changed the state it was given"),
        (Remembering, {"determinism"}, "two equal calls gave different results"),
        (Detached, {"gradients", "reference"}, "the gradient of x along a direction is 0, the slope"),
        (Function, {"round trip"}, "the state cannot be saved and loaded"),
        (Wrong, {"reference"}, "outputs[0]: apart by"),
    ],
)
def test_a_module_that_breaks_a_law(kind, broken, message):
    torch.manual_seed(0)
    own = found(kind())
    missed = {law for law, each in own.items() if each.holds is False}
    assert broken <= missed
    assert message in next(each.detail for law, each in own.items() if law in broken)
    if kind in (Forgetful, Detached, Function, Wrong):  # the others break more laws than the one they are for
        assert missed == broken


def test_contraction_is_the_largest_growth():
    growth = lambda decay: state_growth(Sum(decay).double(), (draw(5), draw(5)), draw(20))
    assert growth(0.9) < 1
    assert math.isclose(growth(1.5), 1.5**10, rel_tol=1e-9)
    assert growth(1.0) == pytest.approx(1.0, abs=1e-12)
    assert found(Sum(1.5), laws=["contraction"])["contraction"].detail.startswith(
        "the difference between two"
    )


def test_tensors_are_found_in_any_state():
    @dataclass
    class Cache:
        past: torch.Tensor
        places: dict

    class Table:
        """A container with ``values``, as a TensorDict is."""

        def values(self):
            return iter([torch.ones(1)])

    found = tensors((Cache(torch.zeros(1), {"a": torch.ones(2)}), [Table(), None, 3]))
    assert [x.tolist() for x in found] == [[0.0], [1.0, 1.0], [1.0]]


def test_gradients_of_a_module_that_rounds_to_float32_inside():
    class Rounded(Sum):
        def inputs(self, x):
            return self.project(x).float().tanh().double()

    class RoundedAndWrong(Rounded):
        def forward(self, x, state=None):
            y, total = super().forward(x, state)
            return y + y.detach(), total

    assert found(Rounded(), laws=["gradients"])["gradients"].holds
    assert not found(RoundedAndWrong(), laws=["gradients"])["gradients"].holds


def test_a_module_without_state_and_one_of_token_ids():
    own = found(nn.Linear(4, 4))
    assert {law for law, each in own.items() if each.holds} == {
        "causality",
        "rows",
        "determinism",
        "gradients",
    }
    assert own["split"].holds is None and own["split"].detail == "forward has no parameter 'state'"

    class Embedded(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(9, 4), Sum())

        def forward(self, x, state=None):
            return self[1](self[0](x), state)

    ids = check(Embedded().double(), lambda tokens: torch.randint(9, (2, tokens)), tokens=8)
    assert {each.law: each.holds for each in ids} == {**dict.fromkeys(LAWS, True), "reference": None}


def test_the_default_memory_keeps_every_law():
    own = check(
        NeuralMemory(dim=8, heads=2, chunk=4).double(), lambda n: torch.randn(2, n, 8).double(), tokens=14
    )
    assert {each.law: each.holds for each in own} == {**dict.fromkeys(LAWS, True), "reference": None}


def test_the_command(command, capsys):
    short = ["--tokens", "12", "--dim", "5"]
    assert "│ contraction │ yes" in command("check", f"{EXAMPLE}:RunningMean", *short)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["check", f"{EXAMPLE}:LeakyMean", *short])
    assert "│ causality   │ no " in capsys.readouterr().out
    rows = json.loads(
        command("check", "torch.nn:GRU", "input_size=4", "hidden_size=3", "batch_first=True", "--state", "hx",
                "--json", "--dim", "4", "--tokens", "6", "--laws", "causality", "split", "rows")
    )  # fmt: skip
    assert [(row["law"], row["holds"]) for row in rows] == [
        ("causality", True),
        ("split", True),
        ("rows", True),
    ]


def test_a_broken_law_is_exit_code_1_and_contraction_only_if_named(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "growing_sums.py").write_text(
        "from torch import nn\n"
        "class Growing(nn.Module):\n"
        "    def forward(self, x, state=None):\n"
        "        sums = (0 if state is None else state) + x.cumsum(1)\n"
        "        return sums, 1.5 * sums[:, -1:] if state is None else sums[:, -1:]\n"
        "class Doubling(nn.Module):\n"
        "    def forward(self, x, state=None):\n"
        "        state = x[:, 0] * 0 if state is None else state\n"
        "        ys = []\n"
        "        for t in range(x.shape[1]):\n"
        "            state = 2 * state + x[:, t]\n"
        "            ys.append(state)\n"
        "        import torch\n"
        "        return torch.stack(ys, 1), state\n"
    )
    place = tmp_path / "growing_sums.py"
    assert "not causal" not in command("check", f"{place}:Growing", "--tokens", "8", code=1)
    assert "│ contraction │ no" in command("check", f"{place}:Doubling", "--tokens", "8")
    command("check", f"{place}:Doubling", "--tokens", "8", "--laws", "contraction", code=1)
    sys.modules.pop("growing_sums")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:Any"], "module: expected a file, got 'nowhere.py', which does not exist"),
        (["remanence"], "module: expected module.py:Class or package.module:Class, got 'remanence'"),
        (["no_such_package:Any"], "module: no_such_package could not be imported: ModuleNotFoundError"),
        ([f"{EXAMPLE}:LeekyMean"], "did you mean 'LeakyMean'?"),
        (["torch.nn:Linear", "in_features=3"], "TypeError: Linear.__init__() missing 1 required"),
        (["torch.nn:Linear", "3"], "arguments: expected name=value, got '3'"),
        (["remanence:NeuralMemory", "dim=-1"], "could not be made: ValueError: dim: expected an integer"),
        (["torch:eye", "n=3"], "torch:eye: expected a torch.nn.Module, got Tensor"),
        (
            ["torch.nn:Linear", "in_features=3", "out_features=3"],
            "Linear: forward failed on [3, 96, 16]: Runtime",
        ),
        ([f"{EXAMPLE}:LeakyMean", "--tokens", "2"], "--tokens: expected at least 4, got 2"),
        ([f"{EXAMPLE}:LeakyMean", "--laws", "causal"], "did you mean 'causality'?"),
    ],
)
def test_wrong_arguments(arguments, message, command):
    assert message in command("check", *arguments, code=2)
