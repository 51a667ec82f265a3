"""Put a NeuralMemory into a GPT of your own, in place of attention. It learns to repeat what it read, and then
reads in pieces of any length. About 20 s on a CPU.
"""

import torch
from torch import nn

from remanence import NeuralMemory


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.memory = NeuralMemory(dim=dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, state=None):
        y, state = self.memory(self.ln_1(x), state)
        x = x + y
        return x + self.mlp(self.ln_2(x)), state


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, dim: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens, states=None):
        x, ends = self.wte(tokens), []  # no positions: the order is in what the memory has read
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            ends.append(state)
        return self.lm_head(self.ln_f(x)), ends


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(220):
    tokens = torch.randint(32, (16, 16)).repeat(1, 3)  # three times the same; the first is unpredictable
    logits, _ = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits[:, 16:].flatten(0, 1), tokens[:, 17:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss on the repeats {loss.item():.3f} (guessing: 3.466)")

with torch.no_grad():
    whole, _ = model(tokens)
    state, pieces = None, []
    for piece in tokens.split([5, 1, 30, 12], 1):
        logits, state = model(piece, state)
        pieces.append(logits)
print(f"read in four pieces, the logits differ by at most {(torch.cat(pieces, 1) - whole).abs().max():.1e}")
