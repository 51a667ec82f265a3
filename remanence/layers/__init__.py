"""Building blocks of architectures: projections, norm, feed-forward, rotary positions, convolution, features, gates.

A parameter may have an additional first axis: the stacked weights of several layers, each of which applies to an equal
share of the batch rows (`remanence.mixers.wavefront`). Attention is in `remanence.layers.attention`.
"""

from remanence.layers.conv import ShortConv
from remanence.layers.features import Features, per_head_matmul
from remanence.layers.feed_forward import SwiGLU
from remanence.layers.gates import GateProjection
from remanence.layers.linear import Linear, matmul_dtype, project
from remanence.layers.norm import RMSNorm, l2_normalize
from remanence.layers.rotary import Rotary, rotary_from_start
from remanence.layers.sparse_features import SparseFeatures
from remanence.runtime.module import Module, assign

__all__ = [
    "Features",
    "GateProjection",
    "Linear",
    "Module",
    "RMSNorm",
    "Rotary",
    "ShortConv",
    "SparseFeatures",
    "SwiGLU",
    "assign",
    "l2_normalize",
    "matmul_dtype",
    "per_head_matmul",
    "project",
    "rotary_from_start",
]
