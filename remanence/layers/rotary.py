"""Rotary position embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.ops.triton import layer
from remanence.runtime.cache import cached_by_size


class Rotary:
    """A rotation of each pair of channels of ``[r t h e]`` by an angle proportional to the token's position.
    Angles are computed in float64, because in float32 they are off by 0.04 at position two million.
    """

    def __init__(self, position: Int[Tensor, "#r t"], width: int, base: float, dtype: torch.dtype) -> None:
        self.dtype = dtype if dtype == torch.float64 else torch.float32
        half = torch.arange(width // 2, dtype=torch.float64, device=position.device) / (width // 2)
        angles = position.unsqueeze(-1) * base**-half
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def __call__(self, x: Float[Tensor, "r t h e"]) -> Float[Tensor, "r t h e"]:
        if layer.is_supported(x, width=x.shape[-1]):
            return layer.rotary(x, self.cos, self.sin)
        (a, b), cos, sin = x.to(self.dtype).chunk(2, -1), self.cos.unsqueeze(-2), self.sin.unsqueeze(-2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@cached_by_size
def rotary_from_start(
    length: int, repeats: int, width: int, base: float, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Return the `Rotary` of the positions 0 to length - 1, concatenated `repeats` times. It is cached and
    shared by all layers and calls that start at position 0.
    """
    position = torch.arange(length, device=device).repeat(repeats).unsqueeze(0)
    return Rotary(position, width, base, dtype)
