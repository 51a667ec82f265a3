"""The parts that architectures are made of: projections, norm, feed-forward, rotary positions, convolution, features,
gates.

Every parameter may have one axis more in front: the weights of several layers at once, each for its equal share of the
rows, which stand one behind the other (`remanence.mixers.wavefront`). Attention is in `remanence.layers.attention`.
"""

from remanence.layers.conv import ShortConv
from remanence.layers.features import Features, by_heads
from remanence.layers.feed_forward import SwiGLU
from remanence.layers.gates import GateProjection
from remanence.layers.linear import Linear, operand, project
from remanence.layers.norm import RMSNorm, unit
from remanence.layers.rotary import Rotary, from_start
from remanence.runtime.module import Module, assign

__all__ = [
    "Features",
    "GateProjection",
    "Linear",
    "Module",
    "RMSNorm",
    "Rotary",
    "ShortConv",
    "SwiGLU",
    "assign",
    "by_heads",
    "from_start",
    "operand",
    "project",
    "unit",
]
