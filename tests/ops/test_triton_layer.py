"""Law 1 for the kernels around the memory: they are torch's functions in every output and every gradient.

As test_triton.py: interpreted, in a process of their own, in float64, into outputs full of NaN.
"""

import pytest
import torch
import torch.nn.functional as F

from remanence import NeuralMemory
from remanence.layers import Features, GateProjection, RMSNorm, Rotary, ShortConv, per_head_matmul
from remanence.mixers.window_and_memory import Join
from remanence.ops.triton import layer
from remanence.ops.triton.layer import features, norms, pointwise, tiles
from remanence.testing import assert_close, assert_same_function, distance, tensors

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("full_of_nan")]


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def torch_conv(x, past, weight, heads, unit):
    conv = ShortConv(*weight.shape[-2:], past.shape[1] - weight.shape[-1] + 1)
    return with_parameters(conv, weight=weight).convolve_heads(x, past, None, heads, normalize=unit)


def torch_gates(x, weight, bias, heads, negated):
    return with_parameters(
        GateProjection(x.shape[-1], heads, [0.0] * len(negated)), weight=weight, bias=bias
    ).log_sigmoids(x, negated)


def torch_norm(x, gate, weight, eps):
    return with_parameters(RMSNorm(x.shape[-1], eps), weight=weight).normalize_gated(x, gate)


def torch_rms(x, weight, eps, dtype):
    return with_parameters(RMSNorm(x.shape[-1], eps), weight=weight)(x)


def torch_join(x, m, weight, gain, eps):
    join = Join(x.shape[-1])
    with_parameters(join.norm_attention, weight=weight), with_parameters(join.norm_memory, weight=gain)
    return join(x, m)


def torch_swiglu(gate, up):
    return F.silu(gate) * up


def torch_rotary(x, position):
    return Rotary(position, x.shape[-1], 100.0, torch.float64)(x)


def rotary(x, position):
    """With heads before tokens, as attention has them, on half of the way."""
    turn = Rotary(position, x.shape[-1], 100.0, torch.float64)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    return layer.rotary(turned, turn.cos, turn.sin)


def torch_heads(x, weight, base=None):
    return per_head_matmul(x, weight, base)


def torch_key_features(x, up, down):
    heads, hidden, width = down.shape[-3:]
    return with_parameters(Features(heads, width, hidden), up0=up, down0=down)(x)


def with_parameters(module, **values):
    for name, value in values.items():
        delattr(module, name)
        setattr(module, name, value)
    return module


CONVS = {  # rows, tokens, heads, width, taps, history, unit
    "many tiles": (2, 21, 2, 64, 4, 5, True),
    "odd": (2, 37, 3, 12, 3, 2, True),
    "one token": (1, 1, 1, 8, 4, 3, True),
    "shorter than its taps": (2, 3, 1, 5, 8, 7, True),
    "one tap": (2, 9, 2, 16, 1, 0, True),
    "eight taps": (1, 40, 1, 16, 8, 10, False),
    "sixteen taps": (2, 40, 2, 16, 16, 20, True),
    "wide": (1, 7, 1, 200, 4, 3, False),
    "not at length 1": (2, 19, 2, 24, 2, 4, False),
}
GATES = {  # rows, tokens, channels, heads, flipped
    "many tiles": (2, 70, 128, 16, (False, False, True)),
    "odd": (2, 37, 100, 3, (False, True)),
    "one token": (1, 1, 5, 1, (True,)),
    "many gates": (1, 40, 64, 40, (False, False, True)),
}
NORMS = {
    "many tiles": (2, 40, 3, 64),
    "odd": (2, 37, 2, 12),
    "one token": (1, 1, 1, 5),
    "wide": (1, 5, 2, 200),
}
WIDE_NORMS = {"many tiles": (2, 9, 64), "odd": (3, 5, 300), "one token": (1, 1, 7)}
ROTARIES = {
    "one start": (2, 21, 3, 12, [0]),
    "each its own": (2, 9, 1, 64, [5, 1000]),
}  # rows, tokens, heads, width, starts
PRODUCTS = {  # rows, tokens, heads, inputs, outputs
    "many tiles": (2, 70, 2, 64, 64),
    "odd": (2, 37, 3, 12, 20),
    "one token": (1, 1, 1, 5, 3),
    "wide": (1, 40, 1, 200, 150),
}
LIFTS = {  # rows, tokens, heads, width, hidden
    "many tiles": (2, 70, 2, 64, 64),
    "odd": (2, 37, 3, 12, 20),
    "one token": (1, 1, 1, 5, 3),
    "wide keys": (1, 40, 1, 100, 7),
    "wide features": (3, 11, 2, 16, 300),
}


def key_features_leaves(rows, tokens, heads, width, hidden):
    x = F.normalize(torch.randn(rows, tokens, heads, width, dtype=torch.float64), dim=-1).requires_grad_()
    up = (torch.randn(heads, width, 2 * hidden, dtype=torch.float64) / width**0.5).requires_grad_()
    return [x, up, randn(heads, hidden, width)]


def cases():
    """Each kernel and torch's function of the same leaves."""
    for name, (rows, tokens, heads, width, taps, history, unit) in CONVS.items():
        leaves = [
            randn(rows, tokens, heads * width),
            randn(rows, history, heads * width),
            randn(heads * width, taps),
        ]
        yield f"conv, {name}", torch_conv, layer.short_conv, leaves, (heads, unit)
    for name, (rows, tokens, channels, heads, negated) in GATES.items():
        leaves = [
            randn(rows, tokens, channels),
            randn(heads * len(negated), channels),
            randn(heads * len(negated)),
        ]
        yield f"gates, {name}", torch_gates, layer.log_gates, leaves, (heads, negated)
    for name, (rows, tokens, heads, width) in NORMS.items():
        leaves = [randn(rows, tokens, heads, width), randn(rows, tokens, heads * width), randn(width)]
        yield f"norm, {name}", torch_norm, layer.gated_norm, leaves, (1e-6,)
    for name, sizes in LIFTS.items():
        yield f"key_features, {name}", torch_key_features, layer.key_features, key_features_leaves(*sizes), ()
    for name, (rows, tokens, width) in WIDE_NORMS.items():
        leaves = [randn(rows, tokens, width), randn(width)]
        yield f"rms, {name}", torch_rms, layer.rms_norm, leaves, (1e-6, torch.float64)
        leaves = [randn(rows, tokens, width), randn(rows, tokens, width), randn(width), randn(width)]
        yield f"join, {name}", torch_join, layer.sigmoid_gated_norm, leaves, (1e-6,)
    yield "swiglu", torch_swiglu, layer.swiglu, [randn(2, 37, 100), randn(2, 37, 100)], ()
    for name, (rows, tokens, heads, width, starts) in ROTARIES.items():
        position = torch.tensor(starts).unsqueeze(-1) + torch.arange(tokens)
        yield f"rotary, {name}", torch_rotary, rotary, [randn(rows, tokens, heads, width)], (position,)
    for name, (rows, tokens, heads, inputs, outputs) in PRODUCTS.items():
        leaves = [
            randn(rows, tokens, heads, inputs),
            randn(heads, inputs, outputs),
            randn(rows, tokens, heads, outputs),
        ]
        yield f"product, {name}", torch_heads, layer.per_head_matmul, leaves, ()
        yield f"product alone, {name}", torch_heads, layer.per_head_matmul, leaves[:2], ()
    for groups in (2, 3):  # several layers' weights, each for its share of the rows
        rows = 2 * groups
        leaves = [randn(rows, 19, 2 * 12), randn(rows, 7, 2 * 12), randn(groups, 2 * 12, 4)]
        yield f"conv, {groups} layers", torch_conv, layer.short_conv, leaves, (2, True)
        leaves = [randn(rows, 37, 40), randn(groups, 3 * 2, 40), randn(groups, 3 * 2)]
        yield f"gates, {groups} layers", torch_gates, layer.log_gates, leaves, (3, (False, True))
        leaves = [randn(rows, 21, 2, 12), randn(rows, 21, 2 * 12), randn(groups, 12)]
        yield f"norm, {groups} layers", torch_norm, layer.gated_norm, leaves, (1e-6,)
        parts = [key_features_leaves(2, 23, 2, 12, 20) for _ in range(groups)]
        leaves = [
            torch.cat([x.detach() for x, _, _ in parts]),
            *[torch.stack([p[i].detach() for p in parts]) for i in (1, 2)],
        ]
        yield (
            f"key_features, {groups} layers",
            torch_key_features,
            layer.key_features,
            [x.requires_grad_() for x in leaves],
            (),
        )
        leaves = [randn(rows, 21, 2, 12), randn(groups, 2, 12, 20), randn(rows, 21, 2, 20)]
        yield f"product, {groups} layers", torch_heads, layer.per_head_matmul, leaves, ()
        leaves = [randn(rows, 5, 24), randn(groups, 24)]
        yield f"rms, {groups} layers", torch_rms, layer.rms_norm, leaves, (1e-6, torch.float64)
        leaves = [randn(rows, 5, 24), randn(rows, 5, 24), randn(groups, 24), randn(groups, 24)]
        yield f"join, {groups} layers", torch_join, layer.sigmoid_gated_norm, leaves, (1e-6,)


NUMBER = 53
"""Of `cases`."""


def test_every_case_is_run():
    assert len(list(cases())) == NUMBER


@pytest.fixture(params=range(NUMBER))
def case(request):
    torch.manual_seed(0)
    return list(cases())[request.param][1:]


def gradients(function, leaves, constants, seed=1):
    outputs = tensors(function(*leaves, *constants))
    torch.manual_seed(seed)
    # Numbers that every dtype has: the same loss in all of them.
    loss = sum((x * torch.randn(x.shape).to(torch.bfloat16).to(x.dtype)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def test_the_same_function(case):
    plain, ours, leaves, constants = case
    assert_same_function(
        lambda *x: plain(*x, *constants), lambda *x: ours(*x, *constants), leaves, tolerance=1e-10
    )


@pytest.mark.sample(NUMBER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_exact_as_torch_and_twice_the_same(case, dtype):
    plain, ours, leaves, constants = case
    # Parameters stay float32, as they do under autocast; so does a past.
    narrow = {torch_norm: (0, 1), torch_join: (0, 1), torch_swiglu: (0, 1), torch_heads: (0, 2)}.get(
        plain, (0,)
    )
    moved = [x.detach().to(dtype if i in narrow else torch.float32) for i, x in enumerate(leaves)]
    constants = tuple(dtype if each is torch.float64 else each for each in constants)
    true = gradients(plain, [x.double().requires_grad_() for x in moved], constants)
    moved = [x.requires_grad_() for x in moved]
    theirs, first, second = (gradients(function, moved, constants) for function in (plain, ours, ours))
    for index, (exact, a, b, again) in enumerate(zip(true, theirs, first, second, strict=True)):
        assert a.dtype == b.dtype, f"result {index}"
        # The interpreter cuts off instead of rounding; what a convolution's past and features' parameters get has been
        # through the inputs' dtype, too.
        cut = dtype if index in (2, 3) else b.dtype
        slack = 2e-7 if cut == torch.float32 else torch.finfo(cut).eps
        assert distance(exact, b.double()) <= 2 * distance(exact, a.double()) + slack, f"result {index}"
        assert torch.equal(b, again), f"result {index}"


@pytest.mark.parametrize("part", [1, 7, 64])
@pytest.mark.parametrize("name", LIFTS)
def test_features_with_products_over_parts_of_the_tokens(name, part, monkeypatch):
    """Whatever their number, and however many tokens the last of them is short of."""
    monkeypatch.setattr(features, "FEATURE_PART", part)
    assert_same_function(
        torch_key_features, layer.key_features, key_features_leaves(*LIFTS[name]), tolerance=1e-10
    )


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1000, 8191, 100_003])
def test_parts_hold_all_tokens(tokens):
    parts, room = features._padded_tokens(tokens)
    assert 1 <= parts <= features.FEATURE_PARTS and room % parts == 0 and tokens <= room < tokens + parts


def test_untrained_features_are_the_keys():
    """Nothing is added yet, and what will be has its gradient already."""
    x, up, down = key_features_leaves(2, 37, 3, 12, 20)
    with torch.no_grad():
        down.zero_()
    assert distance(x, layer.key_features(x, up, down)) < 1e-10
    assert_same_function(torch_key_features, layer.key_features, [x, up, down], tolerance=1e-10)
    _, _, g_up, g_down = gradients(layer.key_features, [x, up, down], ())
    assert not bool(g_up.any()) and bool(g_down.any())
    for dtype in (torch.float32, torch.bfloat16):
        key = x.detach().to(dtype)
        y = layer.key_features(key, up.detach().float(), down.detach().float())
        assert y.dtype == dtype and distance(key.float(), y.float()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_features_are_unit(dtype):
    x, up, down = (leaf.detach() for leaf in key_features_leaves(2, 37, 3, 12, 20))
    y = layer.key_features(x.to(dtype), up.float(), down.float())
    assert y.dtype == dtype
    assert distance(torch.ones(2, 37, 3), y.float().norm(dim=-1)) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_keys_need_not_be_contiguous():
    x, up, down = key_features_leaves(2, 9, 3, 12, 20)
    turned = x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_()
    assert not turned.is_contiguous()
    assert_same_function(torch_key_features, layer.key_features, [turned, up, down], tolerance=1e-10)


def test_autocast_lowers_no_product_of_features():
    """Forward or backward: keys come in the dtype that products are to have."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in key_features_leaves(2, 9, 3, 12, 20)]
    plain = gradients(layer.key_features, leaves, ())
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(layer.key_features, leaves, ())
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("hidden", [20, 70])
def test_features_of_any_depth_take_the_kernels(hidden, monkeypatch):
    """Of many features those that work by parts."""
    features = Features(3, 12, hidden, 3).double()
    for down in (down for _, down in features.layers):
        torch.nn.init.normal_(down)
    x = randn(2, 9, 3, 12)
    call = lambda x, *values: features(x)
    leaves = [x, *features.parameters()]
    plain = gradients(call, leaves, ())
    asked, used, launch = [], [], tiles.launch_kernel
    monkeypatch.setattr(layer, "is_supported", lambda x, **sizes: asked.append(sizes) or True)
    monkeypatch.setattr(
        tiles, "launch_kernel", lambda name, *args, **how: (used.append(name), launch(name, *args, **how))[1]
    )
    assert_close(plain, gradients(call, leaves, ()), 1e-10)
    assert asked == [{"width": 12, "features": hidden}]
    forward, back = (
        ["key_features_gated", "key_features_added"],
        ["key_features_gated", "key_features_added_backward", "key_features_gated_backward"],
    )
    if hidden <= 64:
        forward, back = (
            ["key_features_kernel"],
            ["key_features_backward", "heads_kernel", "heads_weight_backward", "heads_weight_backward"],
        )
    assert used == 3 * forward + 3 * back


def test_gates_that_are_nearly_open_or_shut_keep_their_digits():
    """Relative to each log itself, up to where exp underflows."""
    bias = torch.tensor([-120.0, -60.0, -10.0, 0.0, 10.0, 40.0, 80.0])
    x, weight = torch.zeros(1, 1, 4), torch.zeros(7, 4)
    (found,) = layer.log_gates(x, weight, bias, 7, [False])
    torch.testing.assert_close(found[0, 0].double(), F.logsigmoid(bias.double()), rtol=1e-6, atol=0)


def test_the_compiler_sees_one_operator():
    past, conv = randn(2, 3, 8), randn(8, 4)
    gates, bias, gain = randn(6, 8), randn(6), randn(4)

    def loss(x):
        y, _ = layer.short_conv(1.5 * x, past, conv, 2, True)
        first, second, third = layer.log_gates(x, gates, bias, 2, [False, True, False])
        lifted = layer.key_features(y, up, down).sin().sum()
        return (
            layer.gated_norm(y, x, gain, 1e-6).square().sum() + (first * second).sum() + third.sin().sum()
        ).log() + lifted

    x, up, down = randn(2, 5, 8), randn(2, 4, 6), randn(2, 3, 4)
    torch.library.opcheck(layer.conv.short_conv_forward, (x, past, conv, 2, True))
    torch.library.opcheck(layer.gates.gates_forward, (x, gates, bias, 2, 2))
    torch.library.opcheck(norms.gated_norm_forward, (x.unflatten(-1, (2, 4)), randn(2, 5, 8), gain, 1e-6))
    torch.library.opcheck(features.key_features_forward, (x.unflatten(-1, (2, 4)), up, down))
    torch.library.opcheck(norms.rms_norm_forward, (x, randn(8), 1e-6, torch.float64))
    torch.library.opcheck(norms.sigmoid_gated_norm_forward, (x, randn(2, 5, 8), randn(8), randn(8), 1e-6))
    torch.library.opcheck(pointwise.swiglu_forward, (x, randn(2, 5, 8)))
    angles = torch.rand(2, 1, 5, 2, dtype=torch.float64)
    torch.library.opcheck(pointwise.rotary_forward, (x.unflatten(-1, (2, 4)), *angles, False))
    leaves = [x, past, conv, gates, bias, gain, up, down]
    true = torch.autograd.grad(loss(x), leaves)
    for backend in ("eager", "aot_eager"):
        found = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(x), leaves)
        assert all(torch.equal(a, b) for a, b in zip(true, found, strict=True))


@pytest.mark.parametrize("rule", ["titans", "ttt"])
def test_a_whole_layer(rule, monkeypatch):
    """In two calls, with gradients through the carried state, to the input and every parameter; then asked."""
    torch.manual_seed(0)
    memory = NeuralMemory(dim=24, heads=2, head_dim=12, chunk=4, rule=rule).double()
    x = randn(2, 11, 24)

    def results():
        y, state = memory(x[:, :6])
        z, state = memory(x[:, 6:], state)
        outputs = [y, z, memory.read(x, state), *[part for part in tensors(state) if part.requires_grad]]
        torch.manual_seed(1)
        loss = sum((out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outputs)
        return outputs, torch.autograd.grad(loss, [x, *memory.parameters()])

    plain = results()
    used = []
    monkeypatch.setattr(layer, "is_supported", lambda x, **sizes: x.numel() > 0)
    launch = tiles.launch_kernel
    monkeypatch.setattr(
        tiles,
        "launch_kernel",
        lambda name, *args, **kwargs: (used.append(name), launch(name, *args, **kwargs))[1],
    )
    ours = results()
    assert_close(plain, ours, 1e-10)
    elsewhere = {
        name
        for name in tiles.TILE
        if name.startswith(("rms_norm", "sigmoid_gated_norm", "rotary", "key_features"))
    }  # or of wider features
    at_once = {"key_features_kernel", "key_features_backward", "heads_kernel", "heads_weight_backward"}
    assert set(used) == ({*tiles.TILE, *layer.gates.GATE_TILE} - elsewhere) | at_once


def test_under_autocast_dtypes_are_torchs(monkeypatch):
    memory = NeuralMemory(dim=24, heads=2, head_dim=12, chunk=4)
    x = torch.randn(2, 11, 24)
    with torch.autocast("cpu", torch.bfloat16):
        plain = memory.trace(x)
        monkeypatch.setattr(layer, "is_supported", lambda x, **sizes: x.numel() > 0)
        ours = memory.trace(x)
    assert [a.dtype for a in tensors(plain)] == [b.dtype for b in tensors(ours)]
    assert distance(plain.y.float(), ours.y.float()) < 0.02


def test_what_they_cannot_run_stays_with_torch():
    assert not layer.is_supported(torch.zeros(1))
    if torch.cuda.is_available():
        x = torch.zeros(1, device="cuda")
        assert layer.is_supported(x)
        for refused in (x.double(), x[:0]):
            assert not layer.is_supported(refused)
        assert (
            not layer.is_supported(x, width=512)
            and not layer.is_supported(x, taps=17)
            and not layer.is_supported(x, gates=200)
        )
        assert layer.is_supported(x, width=256, features=512)
        assert not layer.is_supported(x, width=257, features=1) and not layer.is_supported(x, features=513)
