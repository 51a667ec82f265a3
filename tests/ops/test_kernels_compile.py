"""Every kernel compiles for every generation of chips it is meant for and fits its shared memory; no GPU is needed.

Whether a configuration fits is what `dispatch.build_reason` says before anything is launched; so do these tests.
"""

import importlib.util
import itertools
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remanence.ops import MLP, NETS, RULES, Gates, Rule, decode, start
from remanence.ops.triton import decode as decode_kernels
from remanence.ops.triton import dispatch, memory, nearest, resources
from remanence.ops.triton import linear as fused_linear
from remanence.ops.triton import mlp as fused
from remanence.ops.triton.launch import PRECISION, kernels
from remanence.ops.triton.layer import features, tiles

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
    ),
]

ARCHS = (80, 86, 89, 90)
DEFAULTS = [(width, chunk, "bf16") for width, chunk in itertools.product((64, 256), (16, 64))]
# The newest generation, and the one with the least shared memory at the largest sizes.
QUICK = [(90, (64, 64, "bf16")), (86, (256, 64, "bf16"))]
ALL = [case for case in itertools.product(ARCHS, [*DEFAULTS, (64, 16, "fp32")]) if case not in QUICK]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """One for the whole run: kernels without a hidden axis are the same at every width of it."""
    folder = tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    for reason in (dispatch.chip_reason, dispatch.build_reason):
        reason.cache_clear()
    yield
    for reason in (dispatch.chip_reason, dispatch.build_reason):
        reason.cache_clear()


def plan(hidden, chunk, **changes):
    return fused.Plan(64, hidden, chunk, 1, True, True, True, True, True, PRECISION)._replace(**changes)


def check(arch, case):
    hidden, chunk, dtype = case
    reason = dispatch.build_reason(
        plan(hidden, chunk), DTYPES[dtype], arch, resources.SHARED[arch] * 1024, True
    )
    assert reason is None or (dtype == "fp32" and "of shared memory" in reason), reason


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), QUICK, ids=str)
def test_the_kernels_fit(arch, case):
    check(arch, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "case"), ALL, ids=str)
def test_the_kernels_fit_everywhere(arch, case):
    check(arch, case)


SEARCHES = list(itertools.product(ARCHS, (16, 64, 128), (1, 512), DTYPES))
QUICK_SEARCHES = [(90, 64, 512, "bf16"), (86, 128, 512, "fp32"), (80, 64, 1, "fp32"), (89, 16, 512, "bf16")]


def check_search(arch, width, tokens, dtype):
    launches = nearest.list_launches(8, width, tokens, 2**20, 32, DTYPES[dtype], arch)
    assert {launch.name for launch in launches} == {"group_max_kernel", "rescore_kernel"}
    reason = resources.lacking(kernels(), launches, arch, resources.SHARED[arch] * 1024)
    assert reason is None, reason
    assert arch < 90 or launches[0].constants["BD"] * DTYPES[dtype].itemsize >= 128


@pytest.mark.parametrize("case", QUICK_SEARCHES, ids=str)
def test_the_search_fits(case):
    check_search(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in SEARCHES if case not in QUICK_SEARCHES], ids=str)
def test_the_search_fits_everywhere(case):
    check_search(*case)


LIFTS = list(itertools.product(ARCHS, (16, 64, 128, 256), (16, 64, 128, 512), DTYPES))
QUICK_LIFTS = [
    (90, 64, 64, "bf16"),
    (90, 128, 128, "bf16"),
    (86, 128, 128, "bf16"),
    (86, 128, 128, "fp32"),
    (80, 64, 64, "fp32"),
    (89, 256, 512, "bf16"),
]


def check_key_features(arch, width, hidden, dtype):
    launches = features.list_key_features_launches(8, width, hidden, DTYPES[dtype], arch)
    names = [
        "key_features_gated",
        "key_features_added",
        "key_features_gated",
        "key_features_added_backward",
        "key_features_gated_backward",
    ]
    if max(width, hidden) <= (128 if dtype == "bf16" else 64):
        names = [
            "key_features_kernel",
            "key_features_backward",
            "heads_kernel",
            "heads_weight_backward",
            "heads_weight_backward",
        ]
    assert [launch.name for launch in launches] == names
    reason = resources.lacking(tiles.kernels(), launches, arch, resources.SHARED[arch] * 1024)
    assert reason is None, reason


@pytest.mark.parametrize("case", QUICK_LIFTS, ids=str)
def test_features_fit(case):
    check_key_features(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in LIFTS if case not in QUICK_LIFTS], ids=str)
def test_features_fit_everywhere(case):
    check_key_features(*case)


DECODED = [
    (90, NETS["titans"], Rule(), 64, 64, 64, "bf16"),
    (90, NETS["linear"], RULES["gated_delta"], 128, 64, 64, "bf16"),
    (80, NETS["linear"], Rule(anchor="token", decay_first=True), 128, 128, 128, "fp32"),
    (86, MLP(depth=1, norm=False), Rule(loss="dot", forget=False), 20, 20, 5, "fp32"),
    (89, NETS["linear"], RULES["delta"], 16, 96, 1, "bf16"),
]


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_one_token_fits(case, monkeypatch):
    arch, net, rule, width, values, chunk, dtype = case
    monkeypatch.setattr(dispatch, "decode_reason", lambda *_: None)
    with FakeTensorMode(), torch.device("cpu"), resources.recording() as recorded:
        state = start(net.init(1, width, values=values), 1, rule=rule, chunk=chunk, keys=width)
        q, v = (torch.empty(1, 1, size, dtype=DTYPES[dtype]) for size in (width, values))
        gate = torch.empty(1, 1)
        gates = Gates(gate, gate if rule.momentum else None, gate if rule.forget else None)
        decode.InPlaceMemory(state, net, rule, "triton").step(q, q, v, gates, torch.ones(1, dtype=torch.bool))
    launches = [resources.Launch(*each, decode_kernels.WARPS, 1) for each in recorded]
    assert [launch.name for launch in launches] == [
        "decode_kernel" if net.depth == 2 else "decode_linear_kernel"
    ]
    reason = resources.lacking(kernels(), launches, arch, resources.SHARED[arch] * 1024)
    assert reason is None, reason


def test_every_kernel_is_among_the_launches():
    noted = {
        launch.name
        for hidden in (64, 256)
        for launch in fused.list_launches(plan(hidden, 64), torch.bfloat16, 90)
    }
    assert noted == set(fused.WARPS)
    reading = [launch.name for launch in fused.list_launches(plan(64, 64), torch.bfloat16, 90, train=False)]
    assert reading == ["coef_kernel", "state_kernel", "read_kernel"]


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_no_narrow_tiles_on_hopper(width, dtype):
    """From tiles of less than 128 bytes a row, Triton 3.6 builds kernels there that are wrong (test_kernels_gpu.py saw
    it).
    """
    for depth in (1, 2):
        made = memory.plan_of(MLP(depth=depth), RULES["titans"], width, width, 1, 64)
        written = (fused if depth == 2 else fused_linear).list_launches(made, dtype, 90)
        sides = [
            launch.constants[name]
            for launch in written
            for name in ("BD", "BH", "BV")
            if name in launch.constants
        ]
        assert sides and min(sides) * dtype.itemsize >= 128


def test_what_does_not_fit_is_said_in_words():
    small = plan(16, 16, width=16)
    reason = dispatch.build_reason(small, torch.bfloat16, 86, 1024, False)
    assert reason is not None and "KiB of shared memory, of which sm_86 has 1" in reason
    broken = resources.Launch("coef_kernel", ("*fp32",), {}, 4, 1)
    assert "coef_kernel does not compile for sm_86" in resources.lacking(kernels(), [broken], 86, 2**20)


def test_a_kernel_that_fails_beside_others_is_compiled_again_alone(monkeypatch):
    calls = []

    def build(written, launch, arch):
        calls.append(launch.name)
        if len(calls) == 1:
            raise RuntimeError("at 1:1:\n  x\n  ^") from SystemError("recursion depth")
        return resources.Need(1024, "", 0.0)

    monkeypatch.setattr(resources, "build", build)
    launches = nearest.list_launches(8, 64, 512, 2**20, 32, torch.bfloat16, 90)
    assert resources.lacking(kernels(), launches, 90, 2**20) is None
    assert len(calls) == len(launches) + 1


def test_the_reason_of_a_failed_compilation_is_a_line_with_words(monkeypatch):
    def build(written, launch, arch):
        raise RuntimeError("at 1:1:\n  unknown name\n      ^")

    monkeypatch.setattr(resources, "build", build)
    launches = nearest.list_launches(8, 64, 512, 2**20, 32, torch.bfloat16, 90)
    assert resources.lacking(kernels(), launches, 90, 2**20).endswith("RuntimeError: unknown name")


class Chip:
    major, minor, shared_memory_per_block_optin = 8, 6, 1024


def test_auto_says_it_once_and_goes_on_without_the_kernels(monkeypatch, caplog):
    """As on a chip with too little shared memory; q only says that it is on one."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Chip)
    q = type("Query", (), {"device": torch.device("cuda"), "shape": (1, 32, 1, 16), "dtype": torch.bfloat16})
    with torch.no_grad():
        chosen = [
            dispatch.memory_backend(q, q, MLP(expansion=1.0), RULES["titans"], 16, False) for _ in range(2)
        ]
    assert chosen == ["chunked", "chunked"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "shared memory" in warned[0]
