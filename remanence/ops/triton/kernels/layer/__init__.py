# mypy: ignore-errors
"""What stands around the memory in its layer, each as one pass over its tensors: what a kernel reads it reads from
memory once.

    short_conv_kernel     causal depthwise convolution, SiLU, and unit length per head
    gates_kernel          logits of the input at unit mean square, and their log-sigmoids
    gated_norm_kernel     RMSNorm per head times SiLU of another tensor
    rms_norm_kernel       RMSNorm of whole vectors
    sigmoid_gated_norm_kernel           RMSNorm of one tensor times a sigmoid of another's
    swiglu_kernel         SiLU of one tensor times another
    rotary_kernel         pairs of channels turned by an angle
    heads_kernel          each head times a matrix of its own
    key_features_kernel   unit keys to unit features in one kernel (for narrow ones, whose weights fit a processor)
    key_features_gated    unit features from the products that torch made of unit keys
    key_features_added    the sum of keys and torch's products of their features, normalised to length 1

Weights may come in groups, one for each of so many rows or tokens in a row (`per`): several layers' at once.

Backward computes again what forward did not write. Sums over tokens (the weights' gradients) are taken per program and
added up by torch: no atomics, so that two runs agree bit for bit.
"""

from remanence.ops.triton.kernels.layer.conv import short_conv_kernel, short_conv_slopes, short_conv_turned
from remanence.ops.triton.kernels.layer.features import (
    key_features_added,
    key_features_added_backward,
    key_features_gated,
    key_features_gated_backward,
    key_features_kernel,
    key_features_slopes,
)
from remanence.ops.triton.kernels.layer.gates import gates_backward, gates_kernel, gates_slopes
from remanence.ops.triton.kernels.layer.heads import heads_kernel, heads_weight
from remanence.ops.triton.kernels.layer.norms import (
    gated_norm_backward,
    gated_norm_kernel,
    rms_norm_backward,
    rms_norm_kernel,
    sigmoid_gated_norm_backward,
    sigmoid_gated_norm_kernel,
)
from remanence.ops.triton.kernels.layer.pointwise import rotary_kernel, swiglu_backward, swiglu_kernel

__all__ = [
    "gated_norm_backward",
    "gated_norm_kernel",
    "gates_backward",
    "gates_kernel",
    "gates_slopes",
    "heads_kernel",
    "heads_weight",
    "key_features_added",
    "key_features_added_backward",
    "key_features_gated",
    "key_features_gated_backward",
    "key_features_kernel",
    "key_features_slopes",
    "rms_norm_backward",
    "rms_norm_kernel",
    "rotary_kernel",
    "short_conv_kernel",
    "short_conv_slopes",
    "short_conv_turned",
    "sigmoid_gated_norm_backward",
    "sigmoid_gated_norm_kernel",
    "swiglu_backward",
    "swiglu_kernel",
]
