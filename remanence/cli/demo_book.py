"""First part of the demo: the packaged model reads a book with facts inserted and answers questions about them."""

from __future__ import annotations

import lzma
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.cli.arguments import Mode
from remanence.cli.progress import Progress
from remanence.inference.session import Session
from remanence.io.shipped import FOLDER
from remanence.model import Model
from remanence.tasks.facts import WORDINGS
from remanence.tasks.needle import draw_unused
from remanence.tokenizers.tokens import load_tokenizer

MODEL, BOOK = "remanence-small", FOLDER / "frankenstein.txt.xz"
"""Name of the packaged model, and file of the packaged book."""
TITLE = "Mary Shelley's Frankenstein"
FACTS = 4
"""Number of facts that are inserted."""
FACT_SPACING = 512
"""Number of characters of the book between two facts. The rest of the book follows the last fact, before the
questions.
"""
REACH = 8
"""Length of the text that is read without written memory, as a multiple of the window times the number of
layers, which is how far windowed attention can see.
"""


def draw_facts(book: str, seed: int) -> list[tuple[str, str, str]]:
    """Return the statement, question and answer of each of `FACTS` random facts. No answer occurs in the
    book.
    """
    rng = np.random.default_rng(seed)
    names, values = (draw_unused(book, rng, what, FACTS, []) for what in ("key", "number"))
    facts = []
    for name, value in zip(names, values, strict=True):
        adjective, noun = name.split("-")
        facts.append((*WORDINGS["asked"](adjective, noun, value), value))
    return facts


def insert_facts(book: str, statements: list[str]) -> tuple[str, str]:
    """Insert a statement after about every `FACT_SPACING` characters, at the end of a sentence. Returns the
    beginning of the book with the statements, and the rest of the book.
    """
    parts, start = [], 0
    for statement in statements:
        end = book.index(". ", start + FACT_SPACING) + 1
        parts += [book[start:end], statement]
        start = end
    return "".join(parts), book[start:]


def read_book(folder: Path, device: torch.device, seed: int, tokens: int) -> dict[str, Any]:
    """Read `tokens` bytes of the book, save the memory, and query a newly loaded model; then query the model
    with frozen memory and with memory off. Returns the questions, answers and measurements for recall.json.
    """
    began, book = time.monotonic(), lzma.decompress(BOOK.read_bytes()).decode()
    facts = draw_facts(book, seed)
    beginning, rest = insert_facts(book, [stated for stated, *_ in facts])
    rest = rest.encode()[:tokens].decode(errors="ignore")
    path = folder / "book.mem"
    session = _session(device)
    session.read(beginning)
    with Progress(keep=True) as progress:
        bar = progress.add("reading", tokens, TITLE)
        before = session.tokens
        for _ in session.read_pieces(rest):
            bar.update(session.tokens - before)
    session.save(path)
    read = time.monotonic() - began
    window = session.model.config.window * session.model.config.num_layers
    remembered, others = _session(device).load(path), {}
    for mode in ("frozen", "off"):
        others[mode] = _session(device, mode)
        # Windowed attention cannot see farther back, so only the end of the text is read.
        others[mode].read((beginning + rest)[-REACH * window :])
    return {
        "model": MODEL,
        "book": TITLE,
        "tokens": session.tokens,
        "window": session.model.config.window,
        "distance": session.tokens - before,
        "bytes": path.stat().st_size,
        "seconds": round(read, 1),
        "facts": [stated.strip() for stated, *_ in facts],
        "questions": [question.strip() for _, question, _ in facts],
        "answers": [value for *_, value in facts],
        "on": [_answer(remembered, question) for _, question, _ in facts],
        **{mode: [_answer(other, question) for _, question, _ in facts] for mode, other in others.items()},
    }


def _session(device: torch.device, memory_mode: Mode = "on") -> Session:
    """Return a new session with the packaged model."""
    return Session(Model.load(MODEL, device=device).eval(), load_tokenizer(MODEL), memory_mode=memory_mode)


def _answer(session: Session, question: str) -> str:
    """Return the answer to a question. The session itself is not changed, so all questions are asked from the
    same memory.
    """
    return session.fork().generate(question, max_tokens=12, temperature=0, stop=(".", "\n")).strip()
