"""Public memories as modules for ``remanence check``. Each class wraps a layer as its documentation calls it.

remanence check experiments/laws/peers.py:TitansMemory --tokens 24 --rows 2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TitansMemory(nn.Module):
    """NeuralMemory of titans-pytorch, called with the state that its previous call returned."""

    def __init__(self, dim: int = 16, chunk_size: int = 4) -> None:
        super().__init__()
        from titans_pytorch import NeuralMemory

        self.memory = NeuralMemory(dim=dim, chunk_size=chunk_size)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.memory(x, state=state)
        return y, state


class TitansMAC(nn.Module):
    """MemoryAsContextTransformer of titans-pytorch: token ids to logits."""

    def __init__(self, vocabulary: int = 50) -> None:
        super().__init__()
        from titans_pytorch import MemoryAsContextTransformer

        self.model = MemoryAsContextTransformer(
            num_tokens=vocabulary, dim=16, depth=2, segment_len=8, num_persist_mem_tokens=2,
            num_longterm_mem_tokens=2, dim_head=8, heads=2, neural_memory_layers=(2,),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class TPTT(nn.Module):
    """LinearAttention of tptt, whose operators keep a delta rule's state inside the module."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        from tptt.modeling_tptt import LinearAttention

        self.layer = LinearAttention(hidden_dim=dim, num_heads=2, linear_precision=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
