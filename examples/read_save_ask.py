"""Read a long text once, save the memory, and query it later in a new session. A minute on a CPU, mostly training.

The model is trained on texts in which letters have numbers ("k4", and later "k4" again, with noise in between), so that
it learns to remember. Then it reads a new text, eight times longer than any before, in which five letters get their
numbers at the very beginning only.
"""

import random
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from remanence import Model, ModelConfig, Session

LETTERS, NOISE = "abcdefghijklmnop", "ABCDEFGHIJKLMNOP .,;"


def facts(chance: random.Random) -> dict[str, str]:
    return {letter: chance.choice("0123456789") for letter in chance.sample(LETTERS, 5)}


def noise(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(NOISE, k=length))


def story(chance: random.Random, known: dict[str, str], rounds: int, gap: int) -> str:
    """Every fact once, noise, every fact again in another order, and so on."""
    parts = []
    for _ in range(rounds):
        parts.append("".join(letter + known[letter] for letter in chance.sample(sorted(known), len(known))))
        parts.append(noise(chance, chance.randrange(gap)))
    return "".join(parts)


def train(steps: int) -> Model:
    torch.manual_seed(0)
    chance = random.Random(0)
    config = ModelConfig(
        vocab_size=257, dim=64, num_layers=2, pattern=("lmm",), segment=64, memory={"heads": 2}
    )
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        texts = [story(chance, facts(chance), rounds=5, gap=10)[:80].ljust(80) for _ in range(16)]
        tokens = torch.tensor([list(text.encode()) for text in texts])
        logits, _ = model(tokens[:, :-1])
        asked = (tokens[:, 1:] >= ord("0")) & (tokens[:, 1:] <= ord("9"))
        asked[:, :10] = False  # a letter's number is unknown the first time
        loss = cross_entropy(logits[asked], tokens[:, 1:][asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 39:
            print(f"step {step + 1}: loss {loss.item():.3f} (guessing: 2.303)", flush=True)
    return model.eval()


model = train(240)
chance = random.Random(1)
known = facts(chance)
book = story(chance, known, rounds=1, gap=1) + noise(chance, 600)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "book.mem"
    session = Session(model)
    reading = session.read(book)
    session.save(path)
    size = path.stat().st_size
    print(f"read {reading.tokens} tokens, mean surprise {reading.surprise:.2f}, saved {size:,} bytes")

    later = Session(model).load(path)
    greedy = {"max_tokens": 1, "temperature": 0}
    right = sum(later.fork().generate(letter, **greedy) == number for letter, number in known.items())
    without = sum(Session(model).generate(letter, **greedy) == number for letter, number in known.items())
print(f"asked for {len(known)} numbers: {right} right from the memory, {without} right without it")
