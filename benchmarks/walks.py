"""Count the files and functions of the package that a call passes through.

    python benchmarks/walks.py            # training step, reading a file, forward pass of an attached model
    python benchmarks/walks.py --list     # and the functions, by file

Each call runs before it is counted, so that imports and first-time set-up are left out. A function counts once,
however often it is called; lambdas and comprehensions belong to the function in which they are written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

import remanence

PACKAGE = Path(remanence.__file__).parent
ANONYMOUS = {"<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>"}
Walk = dict[str, set[str]]


def walk(call: Callable[[], object]) -> Walk:
    """The functions of the package that a call enters, by file. Backward runs in threads of its own: they count."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found: Walk = {}
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE) and code.co_name not in ANONYMOUS:
            found.setdefault(str(path.relative_to(PACKAGE)), set()).add(code.co_qualname)
    return found


def training_step() -> Walk:
    """The third step of a run of MAC on generated data, with its line in the metrics."""
    from remanence.recipes import load_recipe
    from remanence.train import Run
    from remanence.train.config import override

    changes = {"steps": "4", "batch": "4", "device": "cpu", "log_every": "1", "model.pattern": "mac"}
    config = override(load_recipe("recall"), changes)
    with tempfile.TemporaryDirectory() as folder, Run.open(config, Path(folder) / "run") as run:
        run.step()
        run.step()
        return walk(run.step)


def reading_a_file() -> Walk:
    """`remanence read MODEL FILE --save FILE` of a MAC."""
    from remanence import Model, preset
    from remanence.cli import main

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Model(preset("tiny", variant="mac")).save(folder / "model")
        (folder / "book.txt").write_text("It was a dark and stormy night. " * 200)
        read = lambda out: main(["read", str(folder / "model"), str(folder / "book.txt"), "--save", str(out)])
        read(folder / "first.mem")
        return walk(lambda: read(folder / "second.mem"))


def attached_forward() -> Walk:
    """The forward pass of a Llama with memories attached."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=257, **shape)).eval()
    model = remanence.attach(base, every=2, window=32)
    tokens = torch.randint(257, (1, 200))
    with torch.no_grad():
        model(tokens)
        return walk(lambda: model(tokens))


WALKS = {
    "training step": training_step,
    "reading a file": reading_a_file,
    "attached forward": attached_forward,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the functions, too")
    arguments = parser.parse_args()
    for name, call in WALKS.items():
        found = call()
        print(f"{name}: {len(found)} files, {sum(map(len, found.values()))} functions")
        for file in sorted(found) if arguments.list else ():
            print(f"  {file}: {', '.join(sorted(found[file]))}")


if __name__ == "__main__":
    main()
