"""NeuralMemory inside a model of your own: it learns to repeat what it read, then reads in pieces of any length. About 15 s
on a CPU.
"""

import torch
from torch import nn

from remanence import NeuralMemory


class Tiny(nn.Module):
    def __init__(self, vocabulary: int = 32, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.memory = NeuralMemory(dim=dim, heads=2, expansion=2)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens, state=None):
        x = self.embed(tokens)
        y, state = self.memory(self.before(x), state)
        return self.head(self.after(x + y)), state


torch.manual_seed(0)
model = Tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(220):
    tokens = torch.randint(32, (16, 16)).repeat(1, 3)  # sixteen random tokens, three times: the first time cannot be predicted
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
