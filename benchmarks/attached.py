"""A pretrained model with a memory of sentences: tokens per second read and answered, and seconds to its first answer.

    python benchmarks/attached.py [MODEL] --device cpu --dtype bfloat16

Reading is timed with the attention that is used without gradients and with the one that has gradients; answers are
timed in fixed buffers (`SentenceDecoder`) and with one call of the model per token. Both take turns in one process, and
times are medians of rounds. Then a new process loads the model and answers a question. Prints a table, writes
benchmarks/out/attached.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from remanence.inference.sentence_decoder import SentenceDecoder
from remanence.inference.session import load_model
from remanence.runtime.device import inference_dtype

FIRST_ANSWER = """
import sys
from remanence import Session
from remanence.inference.session import load_model
import torch
model = load_model(sys.argv[1], device=sys.argv[2], dtype=getattr(torch, sys.argv[3])).eval()
session = Session(model)
prompt = "<|im_start|>user\\nMy dog is called Rex.<|im_end|>\\n<|im_start|>assistant\\n"
for text in session.stream(prompt, temperature=0, max_tokens=8):
    break
"""


class Clock:
    """Measures seconds of this process on its CPU (`cpu`), or on the clock."""

    def __init__(self, device: str, cpu: bool) -> None:
        self.device, self.now = device, time.process_time if cpu else time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        start = self.now()
        work()
        self._wait()
        return self.now() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def in_turns(clock: Clock, works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after a first round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = clock.seconds(work)
            if number:
                found[name].append(taken)
    return {name: statistics.median(times) for name, times in found.items()}


def reading(model: Any, clock: Clock, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of a piece of text in the middle of a document."""
    ids = torch.randint(100, model.vocab_size, (1, tokens), device=model.device)
    with torch.no_grad():
        state = model.attached.trace(ids).state

    def read(gradients: bool) -> object:
        with torch.set_grad_enabled(gradients):
            return model.attached.trace(ids, state)

    works = {"before": lambda: read(True), "now": lambda: read(False)}
    return {name: tokens / seconds for name, seconds in in_turns(clock, works, rounds).items()}


@torch.no_grad()
def answering(model: Any, clock: Clock, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of an answer behind a full window, greedy."""
    form = model.sentences.format
    text = torch.randint(100, model.vocab_size, (1, 700), device=model.device)
    chat = [*form.user, *range(100, 110), form.end, *form.assistant]
    trace = model.trace(torch.cat([text, torch.tensor([chat], device=model.device)], 1))
    allowed = torch.from_numpy(model.segmenter.flags & 8 == 0).to(model.device)
    choose = lambda logits: logits.masked_fill(~allowed, -torch.inf).argmax(-1)
    first, start = choose(model.logits(trace.hidden[:, -1])), trace.state

    def call() -> Tensor:
        token, state = first, start
        for _ in range(tokens):
            seen = model.trace(token.unsqueeze(1), state)
            token, state = choose(model.logits(seen.hidden[:, -1])), seen.state
        return token

    decoder = SentenceDecoder(model, start)

    def decode() -> Tensor:
        token = first
        for _ in range(tokens):
            token = choose(decoder.step(token))
        return token

    def again() -> Tensor:
        # The buffers of a new decoder, the captured step of the old one.
        decoder._begin(start)
        return decode()

    works = {"before": call, "now": decode if clock.device == "cuda" else again}
    return {name: tokens / seconds for name, seconds in in_turns(clock, works, rounds).items()}


def first_answer(model: str, device: str, dtype: str, rounds: int) -> float:
    """Median seconds from the start of a process to the first text of an answer."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_ANSWER, model, device, dtype], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="remanence-smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="by default the fastest of the device")
    parser.add_argument("--read", type=int, default=2048, help="tokens of a piece")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="seconds on the CPU, for a busy machine")
    parser.add_argument("--no-start", action="store_true", help="leave out the first answer of a new process")
    args = parser.parse_args()
    dtype = args.dtype or str(inference_dtype(args.device)).removeprefix("torch.")
    model = load_model(args.model, device=args.device, dtype=getattr(torch, dtype)).eval()
    model.requires_grad_(False)
    clock = Clock(args.device, args.cpu_time)
    found: dict[str, Any] = {
        "reading": reading(model, clock, args.read, args.rounds),
        "answering": answering(model, clock, args.answer, args.rounds),
    }
    unit = "tokens per CPU second" if args.cpu_time else "tokens/s"
    place = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    title = f"{args.model}, {dtype}, {args.device} ({place}), {torch.get_num_threads()} threads; {unit}"
    table = Table("", "before", "now", "ratio", title=title)
    for name, each in found.items():
        ratio = each["now"] / each["before"]
        table.add_row(name, f"{each['before']:.1f}", f"{each['now']:.1f}", f"{ratio:.1f}")
    Console().print(table)
    if not args.no_start:
        found["first answer"] = first_answer(args.model, args.device, dtype, min(3, args.rounds))
        Console().print(f"first answer of a new process: {found['first answer']:.1f} s")
    out = Path(__file__).parent / "out" / "attached.json"
    out.parent.mkdir(exist_ok=True)
    about = {
        "torch": torch.__version__,
        "dtype": dtype,
        "unit": unit,
        "threads": torch.get_num_threads(),
        "place": place,
    }
    out.write_text(json.dumps(about | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
