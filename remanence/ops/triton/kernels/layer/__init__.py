# mypy: ignore-errors
"""Kernels of the operations around the memory in its layer. Each kernel loads its inputs from global memory
only once.

    short_conv_kernel            causal depthwise convolution, SiLU, and scaling to unit length per head
    gates_kernel                 logits from the input scaled to unit mean square, and their log-sigmoids
    gated_norm_kernel            RMSNorm per head times SiLU of another tensor
    rms_norm_kernel              RMSNorm of complete vectors
    sigmoid_gated_norm_kernel    RMSNorm of one tensor times the sigmoid of RMSNorm of another
    swiglu_kernel                SiLU of one tensor times another
    rotary_kernel                rotation of pairs of channels by an angle
    heads_kernel                 product of each head with its own matrix
    key_features_kernel          unit keys to unit features in one kernel (for narrow heads, whose weights
                                 fit on one processor)
    key_features_gated           unit features from the products of unit keys, which torch computes
    key_features_added           the sum of keys and the projections of their features, scaled to unit length

Weights may have several groups, for several layers at once. Each group applies to `group_size` consecutive
rows or tokens. `row_mask` is true for the rows of a tile that are tokens; the others are padding.

Backward recomputes what forward did not save. Sums over tokens (the gradients of weights) are computed per
program and then added by torch. No atomics are used, so two runs give identical results.
"""

from remanence.ops.triton.kernels.layer.conv import (
    short_conv_backward,
    short_conv_input_backward,
    short_conv_kernel,
)
from remanence.ops.triton.kernels.layer.features import (
    key_features_added,
    key_features_added_backward,
    key_features_backward,
    key_features_gated,
    key_features_gated_backward,
    key_features_kernel,
)
from remanence.ops.triton.kernels.layer.gates import gates_backward, gates_kernel, gates_logits_backward
from remanence.ops.triton.kernels.layer.heads import heads_kernel, heads_weight_backward
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
    "gates_logits_backward",
    "heads_kernel",
    "heads_weight_backward",
    "key_features_added",
    "key_features_added_backward",
    "key_features_backward",
    "key_features_gated",
    "key_features_gated_backward",
    "key_features_kernel",
    "rms_norm_backward",
    "rms_norm_kernel",
    "rotary_kernel",
    "short_conv_backward",
    "short_conv_input_backward",
    "short_conv_kernel",
    "sigmoid_gated_norm_backward",
    "sigmoid_gated_norm_kernel",
    "swiglu_backward",
    "swiglu_kernel",
]
