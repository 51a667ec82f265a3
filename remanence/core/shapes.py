"""The axis legend: one letter, one meaning, everywhere in this library.

    b  batch           t  tokens in a call      d  model width
    h  memory heads    e  head width            f  a memory layer's width
    r  state rows: one per document             n  chunks in a call
    c  tokens in a chunk                        m  rows times heads, flattened

Annotations such as ``Float[Tensor, "b t h e"]`` are read by people; the tests check that they are true.
"""
