# mypy: ignore-errors
"""Triton kernels for the closed form of a two-layer memory: x + LN(act(x W1) W2), or without the LayerNorm.

The tokens of a chunk are a tile of C rows. A program processes one (row, head), or one chunk of a (row,
head). The letters are those of `remanence.ops.closed_form`:

    coef_kernel          compute P, (a, r, c, s) and fold from the gates; all chunks in parallel
    state_kernel         iterate W and S over the chunks, from the keys alone; compute D2 and the surprise;
                         one program per (row, head), with the state in registers
    state_stream         the same, with the state in blocks of the hidden axis that go through L2
    read_kernel          compute the answers from the chunks' start states; all chunks in parallel
    read_backward        gradients of q, a, r and half of P; the answers' part of those of the state and of X2
    blend_backward       the other half of P's gradient; the answers' part of those of k and of the keys' D
    carry_kernel         iterate the state's gradient backwards over the chunks; one program per (row, head)
    carry_stream         the same, with the state in blocks of the hidden axis
    keys_backward        gradients of k, c, s and fold, given the gradient of every chunk's end state
    coef_backward        gradients of the gates
    decode_kernel        the whole forward computation for one token, in place
    convolve_kernel      the short convolutions of q, k and v for one token
    copy_weights_kernel  copy the weights at the start of a MAC segment
    peaks_kernel         first pass of the search in a kNN memory (nearest.py)
    rescore_kernel       second pass of that search

The gradient of the state has two parts: one from the answers of each chunk, which is computed in parallel,
and one from later chunks, which is sequential. `carry_kernel` adds them, so that only the recurrence of the
state itself is sequential. Operands of products have the dtype of the inputs (OP). Sums and the state are
float32 (float64 under the interpreter, where the algebra is tested). linear.py and linear_backward.py do the
same for a one-layer memory with the same coefficients, and decode_linear_kernel does it for one token.
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
