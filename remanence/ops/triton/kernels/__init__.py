# mypy: ignore-errors
"""The closed form of a two-layer memory as Triton kernels: x + LN(act(x W1) W2), or without the LayerNorm.

One chunk's tokens are a tile of C rows; a program is one (row, head), or one of its chunks. Letters as in
closed_form:

    coef_kernel          gates -> P, (a, r, c, s), fold; every chunk at once
    state_kernel         W and S over the chunks, from keys alone, with D2 and surprise; one program per (row, head),
                         the state in registers
    state_stream         the same, the state in blocks of the hidden axis, through L2
    read_kernel          the answers, from the states at the chunks' starts; every chunk at once
    read_backward        gradients of q, a, r and half of P; what reading adds to the gradients of the state and of X2
    blend_backward       the other half of P; what reading adds to the gradients of k and of the keys' D
    carry_kernel         the state's gradient, backwards over the chunks; one program per (row, head)
    carry_stream         the same, the state in blocks of the hidden axis
    keys_backward        gradients of k, c, s and fold, given the gradient of every chunk's end state
    coef_backward        gradients of the gates
    decode_kernel        all of it for one token, in place
    convolve_kernel      the short convolutions in front of it
    copy_weights_kernel  the weights at the start of MAC's segments
    peaks_kernel         the kNN memory's search, first pass (nearest.py)
    rescore_kernel       and second pass

What is linear stays split: what reading contributes (parallel) and what comes from later chunks (sequential) are added
up in `carry_kernel`, so that nothing but the state's own recurrence waits. Operands of products have the inputs' dtype
(OP), sums and the state are float32 (float64 under the interpreter, where the algebra is tested). linear.py and
linear_backward.py do the same for one layer, on the same coefficients, and decode_linear_kernel for one token of it.
"""

from remanence.ops.triton.kernels.carry import carry_kernel, carry_stream
from remanence.ops.triton.kernels.coef import coef_backward, coef_kernel
from remanence.ops.triton.kernels.decode import (
    convolve_kernel,
    copy_weights_kernel,
    decode_kernel,
    decode_linear_kernel,
)
from remanence.ops.triton.kernels.keys import keys_backward
from remanence.ops.triton.kernels.linear import linear_read, linear_solve, linear_state
from remanence.ops.triton.kernels.linear_backward import (
    linear_carry,
    linear_keys_backward,
    linear_read_backward,
)
from remanence.ops.triton.kernels.nearest import peaks_kernel, rescore_kernel
from remanence.ops.triton.kernels.read import blend_backward, read_backward, read_kernel
from remanence.ops.triton.kernels.state import state_kernel, state_stream

__all__ = [
    "blend_backward",
    "carry_kernel",
    "carry_stream",
    "coef_backward",
    "coef_kernel",
    "convolve_kernel",
    "copy_weights_kernel",
    "decode_kernel",
    "decode_linear_kernel",
    "keys_backward",
    "linear_carry",
    "linear_keys_backward",
    "linear_read",
    "linear_read_backward",
    "linear_solve",
    "linear_state",
    "peaks_kernel",
    "read_backward",
    "read_kernel",
    "rescore_kernel",
    "state_kernel",
    "state_stream",
]
