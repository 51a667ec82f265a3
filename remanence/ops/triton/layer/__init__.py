"""What a block does around its memory and its projections, on a GPU: convolution, gates, features, norms and rotary
angles, each as one kernel. (Wide features use torch's batched products, with kernels in between.)

Weights may have one more axis in front: groups, the weights of several layers at once. The rows are then split into as
many equal shares, one after the other.

The functions do what `remanence.layers` does in torch; `fits` decides which of the two runs. They are torch operators,
so no graph breaks at them, and differentiable once.
"""

from remanence.ops.triton.layer.conv import short_conv
from remanence.ops.triton.layer.features import key_features
from remanence.ops.triton.layer.gates import log_gates
from remanence.ops.triton.layer.heads import by_heads
from remanence.ops.triton.layer.norms import gated_norm, join, rms_norm
from remanence.ops.triton.layer.pointwise import rotary, swiglu
from remanence.ops.triton.layer.tiles import fits

__all__ = [
    "by_heads",
    "fits",
    "gated_norm",
    "join",
    "key_features",
    "log_gates",
    "rms_norm",
    "rotary",
    "short_conv",
    "swiglu",
]
