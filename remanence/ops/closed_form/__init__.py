"""The closed form of an MLP memory over whole chunks, forward and backward, written out.

Every gradient of an MLP is rank one in each layer's weight, u_l = outer(X_l, D_l), so weights per token never exist:
they appear only as masked products. For the keys at the anchor weights (`record`, one chunk, sequential because the
anchor is the last chunk's end):

    Z_l = X_l W_l,  X_{l+1} = act(Z_l),  D_L = dloss/dZ_L,  D_l = (D_{l+1} W_{l+1}^T) act'(Z_l)

for the queries at every token's own weights (`read`, many chunks at once), with A_1 = Q and A_{l+1} = act(Y_l):

    Y_l = a (A_l W_l) + r (A_l S_l) - [(A_l X_l^T) P] D_l

and for the state at the chunk's end (`fold`). A state is J = (W, S) stacked, ``[m p f f']`` with p = 2, or p = 1 for a
rule without momentum; so a A W + r A S is one product of (a A | r A) with J's rows. A bias is a column of ones in X and
A. The oracle for all of it is autograd through reference.py.
"""

from remanence.ops.closed_form.keys import fold, fold_backward, record, record_backward, record_next
from remanence.ops.closed_form.layers import without_ones
from remanence.ops.closed_form.queries import Reading, read, read_backward
from remanence.ops.closed_form.records import Anchor, Grads, Record, exact, unsupported
from remanence.ops.closed_form.token_exact import (
    Prepared,
    earlier,
    exact_step,
    exact_step_backward,
    prepare,
    prepare_backward,
    solver,
)

__all__ = [
    "Anchor",
    "Grads",
    "Prepared",
    "Reading",
    "Record",
    "earlier",
    "exact",
    "exact_step",
    "exact_step_backward",
    "fold",
    "fold_backward",
    "prepare",
    "prepare_backward",
    "read",
    "read_backward",
    "record",
    "record_backward",
    "record_next",
    "solver",
    "unsupported",
    "without_ones",
]
