# mypy: ignore-errors
"""Triton kernels for the closed form of a two-layer memory: x + LN(act(x W1) W2), or without the LayerNorm.

The tokens of a chunk are a tile of BC rows. A program processes one (row, head), or one chunk of a (row,
head):

    coef_kernel             compute P, (a, r, c, s) and end_factors from the gates; all chunks in parallel
    state_kernel            iterate W and S over the chunks, from the keys alone; compute D2 and the surprise;
                            one program per (row, head), with the state in registers
    state_blocked           the same, with the state in blocks of the hidden axis that go through L2
    read_kernel             compute the answers from the chunks' start states; all chunks in parallel
    read_backward           gradients of q, a, r and half of P; the answers' part of those of the state and of X2
    read_scores_backward    the other half of P's gradient, through the scores Q K^T; the answers' part of those of k
                            and of the keys' D1 and D2
    state_backward          iterate the state's gradient backwards over the chunks; one program per (row, head)
    state_backward_blocked  the same, with the state in blocks of the hidden axis
    keys_backward           gradients of k, c, s and end_factors, given the gradient of every chunk's end state
    coef_backward           gradients of the gates
    decode_kernel           the whole forward computation for one token, in place
    convolve_kernel         the short convolutions of q, k and v for one token
    copy_weights_kernel     copy the weights at the start of a MAC segment
    group_max_kernel        first pass of the search in a kNN memory (nearest.py)
    rescore_kernel          second pass of that search

The letters are those of `remanence.ops.closed_form`. A digit is the layer:

    Q, K, V, y      queries, keys, values and answers of a chunk's tokens
    W1, W2, S1, S2  weights, and their momentum; in the one-layer kernels W and S
    J1, J2          the state at the start of a call, W and S stacked (only W in a rule without momentum); `starts`
                    has it at the start of every chunk, `end` at the end of the call
    Z1, Z2          output of a layer for the keys, before the activation: Z1 = K W1, Z2 = X2 W2
    X2, H           input of the second layer for the keys, act(Z1); A is that of the queries
    D1, D2          error of a layer: the gradient of a key's loss with respect to Z1, Z2
    P               ``[t j]``: the factor of the gradient of token j in the weights with which token t is read, 0 for
                    j > t; ``(Q K^T) P`` is like masked attention scores
    a, r            the factors of W and S of the chunk's start in the weights of token t
    c, s            the factors of a token's gradient in W and S at the chunk's end
    end_factors     (keep, carry, past, 0): W at the chunk's end has keep times W and carry times S of its start, and
                    S at the end has past times S of the start
    theta, eta      step size and momentum gate
    slope           derivative of an activation, or of the loss with respect to a prediction
    g_x             gradient of x

    L, n, m         tokens of a row, chunks of a row, index of a (row, head); i is the chunk of a program, t its
                    tokens, d channels of a head, f hidden units, `at` the tokens' indices in ``[r L heads]``
    D, BD           channels of a head, and the size of the tile that holds them; likewise HIDDEN and BH, CHUNK and
                    BC, and for the values of a one-layer memory E and BV
    PARTS, SIZE     tensors per weight in a state (2 with momentum), and numbers in each
    EVEN            whether tiles end where the tensors end, so that loads need no mask
    ACC, OP         dtypes of sums, and of the operands of products

The gradient of the state has two parts: one from the answers of each chunk, which is computed in parallel,
and one from later chunks, which is sequential. `state_backward` adds them, so that only the recurrence of the
state itself is sequential. Operands of products have the dtype of the inputs (OP). Sums and the state are
float32 (float64 under the interpreter, where the algebra is tested). linear.py and linear_backward.py do the
same for a one-layer memory with the same coefficients, and decode_linear_kernel does it for one token.
"""

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
    linear_keys_backward,
    linear_read_backward,
    linear_state_backward,
)
from remanence.ops.triton.kernels.nearest import group_max_kernel, rescore_kernel
from remanence.ops.triton.kernels.read import read_backward, read_kernel, read_scores_backward
from remanence.ops.triton.kernels.state import state_blocked, state_kernel
from remanence.ops.triton.kernels.state_gradient import state_backward, state_backward_blocked

__all__ = [
    "coef_backward",
    "coef_kernel",
    "convolve_kernel",
    "copy_weights_kernel",
    "decode_kernel",
    "decode_linear_kernel",
    "group_max_kernel",
    "keys_backward",
    "linear_keys_backward",
    "linear_read",
    "linear_read_backward",
    "linear_solve",
    "linear_state",
    "linear_state_backward",
    "read_backward",
    "read_kernel",
    "read_scores_backward",
    "rescore_kernel",
    "state_backward",
    "state_backward_blocked",
    "state_blocked",
    "state_kernel",
]
