"""Speed paths of pretrained models with memories: they compute what the plain path computes."""

import pytest
import torch

from remanence.attached.window import WindowSpec, WindowState, attend
from remanence.layers.attention import AttentionState
from remanence.runtime.device import inference_dtype

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("positions", [None, (0, 5), (100, 24), (100, 100)])
@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_over_a_window_is_the_same_without_gradients(dtype, tokens, positions, rotates):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(2, *shape, 8).to(dtype)
    spec, state = WindowSpec(24, 2, 3), None
    if positions is not None:
        place = torch.tensor(positions)
        window = AttentionState(draw(spec.history, 2), draw(spec.history, 2), place, place.clamp(max=3))
        state = WindowState(draw(2, 2), draw(2, 2), window)
    rotation = (torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)) if rotates else None
    given = draw(tokens, 6), draw(tokens, 2), draw(tokens, 2), state, spec, 0.35, rotation, None
    plain = attend(*given)
    with torch.no_grad():
        fast = attend(*given)
    error = (fast.y.double() - plain.y.double()).abs().max()
    assert error <= TOLERANCES[dtype] * plain.y.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(fast.state.tensors(), plain.state.tensors(), strict=True))


def test_the_dtype_of_a_cpu_depends_on_its_instructions(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert inference_dtype("cpu") == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert inference_dtype("cpu") == torch.bfloat16
