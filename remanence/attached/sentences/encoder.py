"""Keys of sentences and queries of questions, from hidden states of the pretrained model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.attached.sentences.config import SentenceConfig


class SpanEncoder(nn.Module):
    """Maps a span of tokens to a vector of unit length: per head a learned average of hidden states, then a linear map.

    Keys and queries share the values that are averaged; the weights of the averages and the last map are their own. A
    hidden state is the concatenated inputs of the encoded layers, each normalised by its root mean square, then
    standardised with a fixed mean and deviation.
    """

    def __init__(self, dim: int, config: SentenceConfig) -> None:
        super().__init__()
        width, heads = dim * len(config.layers), config.heads
        self.heads = heads
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.deviation = nn.Parameter(torch.ones(width), requires_grad=False)
        self.value = nn.Parameter(torch.randn(width, heads * config.head_dim) / math.sqrt(width))
        self.key_weight = nn.Parameter(torch.zeros(width, heads))
        self.query_weight = nn.Parameter(torch.zeros(width, heads))
        start = torch.randn(heads * config.head_dim, config.key_dim) / math.sqrt(config.key_dim)
        self.key, self.query = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.log_temperature = nn.Parameter(torch.tensor(0.05).log())

    def features(self, layers: list[Tensor]) -> Tensor:
        """The hidden state ``[... d]`` from the inputs of the encoded layers."""
        return torch.cat([F.rms_norm(x, x.shape[-1:], eps=1e-6) for x in layers], -1)

    def forward(self, x: Tensor, mask: Tensor, *, query: bool) -> Tensor:
        """Keys, or queries, of spans: hidden states ``[n l d]``, of which the tokens in `mask` ``[n l]`` belong to the
        span, to ``[n e]``.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)  # float64 stays float64
        own = lambda parameter: parameter.to(dtype)
        inside = (x[mask].to(dtype) - own(self.mean)) / own(self.deviation)
        score = inside @ own(self.query_weight if query else self.key_weight)
        score = score.new_full((*mask.shape, self.heads), -1e4).index_put((mask,), score)
        value = inside @ own(self.value)
        value = value.new_zeros(*mask.shape, value.shape[-1]).index_put((mask,), value)
        value = value.unflatten(-1, (self.heads, -1))
        weight = score.softmax(1)
        pooled = F.normalize(torch.einsum("nlh,nlhe->nhe", weight, value).flatten(1), dim=-1)
        return F.normalize(pooled @ own(self.query if query else self.key), dim=-1)
