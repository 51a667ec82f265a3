"""The operations of a layer other than its memory and projections, on a GPU: convolution, gates, features,
norms and rotary embeddings. Each is one kernel. (Wide features use torch's batched matrix products, with
kernels in between.)

Weights may have a leading axis of groups, for the weights of several layers. The rows of the input are then
divided equally among the groups, in order.

The functions compute the same as `remanence.layers` does in torch; `is_supported` returns whether they can
run. They are torch operators, so torch.compile has no graph breaks at them. They can be differentiated once.
"""

from remanence.ops.triton.layer.conv import short_conv
from remanence.ops.triton.layer.features import key_features
from remanence.ops.triton.layer.gates import log_gates
from remanence.ops.triton.layer.heads import per_head_matmul
from remanence.ops.triton.layer.norms import gated_norm, rms_norm, sigmoid_gated_norm
from remanence.ops.triton.layer.pointwise import rotary, swiglu
from remanence.ops.triton.layer.tiles import is_supported

__all__ = [
    "gated_norm",
    "is_supported",
    "key_features",
    "log_gates",
    "per_head_matmul",
    "rms_norm",
    "rotary",
    "short_conv",
    "sigmoid_gated_norm",
    "swiglu",
]
