"""A plain training loop: train a tiny MAC on the bytes of a text, then measure its memory on a held-out part.

About 40 s on a CPU. Give it a text file of your own: ``python examples/training_loop.py book.txt``.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from remanence import Model, Session, preset
from remanence.model import matched
from remanence.tokenizers.tokens import ByteTokenizer

STEPS, BATCH, LENGTH = 60, 4, 256

path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "paper.md"
text = torch.tensor(ByteTokenizer().encode(path.read_text(encoding="utf-8")))
train, held_out = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :][:1024]

torch.manual_seed(0)
config = preset("tiny", "mac", num_layers=1, segment=64)
model = Model(matched(config))  # as many parameters as a Transformer of this preset
print(f"{path.name}: {len(text):,} bytes; {sum(p.numel() for p in model.parameters()):,} parameters")

optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS, pct_start=0.1)
for step in range(STEPS):
    starts = torch.randint(len(train) - LENGTH - 1, (BATCH,))
    tokens = torch.stack([train[start : start + LENGTH + 1] for start in starts.tolist()])
    logits, state = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if loss.isfinite() and norm.isfinite() and not state.diverged.any():
        optimizer.step()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f} nats/byte, gradient {norm.item():.2f}", flush=True)

model.eval()
with torch.no_grad():
    for mode in ("on", "frozen", "off"):
        logits, _ = model(held_out[None, :-1], memory_mode=mode)
        print(f"held out, memory {mode:6s}: {cross_entropy(logits[0], held_out[1:]).item():.3f} nats/byte")
print(repr(Session(model).generate("The ", max_tokens=40, temperature=0.8)))
