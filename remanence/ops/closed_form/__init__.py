"""The closed form of an MLP memory over chunks of tokens, forward and backward, written out.

A token's gradient is rank one in each layer's weight, u_l = outer(X_l, D_l), so the weights of each token are never
materialised: they appear only in masked products. For the keys at the anchor weights (`record_keys`, one chunk at a
time, because the anchor is the state at the end of the previous chunk):

    Z_l = X_l W_l,  X_{l+1} = act(Z_l),  D_L = dloss/dZ_L,  D_l = (D_{l+1} W_{l+1}^T) act'(Z_l)

for the queries at the weights of each token (`read_queries`, many chunks at once), with A_1 = Q and A_{l+1} = act(Y_l):

    Y_l = a (A_l W_l) + r (A_l S_l) - [(A_l X_l^T) P] D_l

and for the state at the end of the chunk, `write_end_state`. A state is J = (W, S) stacked, ``[m p f f']`` with p = 2,
or p = 1 for a rule without momentum; so a A W + r A S is one product of (a A | r A) with the rows of J. A bias is a
column of ones in X and A. All of it is tested against autograd through reference.py.
"""

from remanence.ops.closed_form.keys import (
    record_keys,
    record_keys_backward,
    record_next_key,
    write_end_state,
    write_end_state_backward,
)
from remanence.ops.closed_form.layers import drop_ones
from remanence.ops.closed_form.queries import QueryActivations, read_queries, read_queries_backward
from remanence.ops.closed_form.records import (
    Anchor,
    ChunkGrads,
    KeyActivations,
    is_token_exact,
    unsupported_reason,
)
from remanence.ops.closed_form.token_exact import (
    PreparedChunks,
    prepare_chunks,
    prepare_chunks_backward,
    previous_token_factors,
    token_exact_solver,
    token_exact_step,
    token_exact_step_backward,
)

__all__ = [
    "Anchor",
    "ChunkGrads",
    "KeyActivations",
    "PreparedChunks",
    "QueryActivations",
    "drop_ones",
    "is_token_exact",
    "prepare_chunks",
    "prepare_chunks_backward",
    "previous_token_factors",
    "read_queries",
    "read_queries_backward",
    "record_keys",
    "record_keys_backward",
    "record_next_key",
    "token_exact_solver",
    "token_exact_step",
    "token_exact_step_backward",
    "unsupported_reason",
    "write_end_state",
    "write_end_state_backward",
]
