"""Forged memory files: one thing of a valid file is another, and the checksum fits again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from remanence.inference import memfile
from remanence.io.tensors import Stored, describe, read_tensors

INTEGERS = (-(2**63), -(2**40), -2, -1, 0, 1, 3, 7, 1000, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 3e38, 1e-45, 0.0, -1.0, 1e6)
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
WORDS: dict[str, tuple[Any, ...]] = {
    "tokens": ([], [-1], [0], [2**62], [2**70], [1.5], [None], [1, 2], {}, "x"),
    "notes": ([], None, {"begun": -5}, {"begun": "x"}, {"source": [1]}),
    "fingerprint": ([], ["", ""], [1, 2], None),
    "large": ({"position": "x"}, {"nowhere": "x"}, {"position": 3}, []),
    "schema": (0, -1, 7, "x", None),
    "config": ({}, [], None, {"dim": 5}),
}


def forged(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor with a value in all places or one, of another dtype, of another shape, or in another order."""
    floating = tensor.is_floating_point()
    values = FLOATS if floating else (False, True) if tensor.dtype == torch.bool else INTEGERS
    for value in values:
        yield f"all {value}", torch.full_like(tensor, value)
        if tensor.numel() > 1:
            for place in (0, tensor.numel() // 2, -1):
                one = tensor.clone()
                one.view(-1)[place] = value
                yield f"[{place}] {value}", one
    if tensor.dtype == torch.int64:
        for step in (-1, 1, 100):
            yield f"{step:+}", tensor + step
    if floating:
        for value in (1e300, -1e300):  # finite in the file alone
            one = tensor.double()
            one.view(-1)[-1:] = value
            yield f"float64 {value}", one
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            yield f"{dtype}", tensor.to(dtype)
    yield "no rows", tensor[:0]
    yield "two rows", torch.cat([tensor, tensor])
    yield "one axis more", tensor.unsqueeze(-1)
    yield "flat", tensor.reshape(-1)
    if tensor.dim() > 1:
        yield "shorter", tensor[:, :-1]
        yield "empty", tensor[:, :0]
        yield "longer", torch.cat([tensor, tensor[:, :1]], 1)
        yield "turned round", tensor.flip(1)


def forgeries(path: Path) -> Iterator[tuple[str, dict[str, Tensor], dict[str, str]]]:
    """Every forgery of a file: what was changed, the tensors, and the header."""
    whole: Stored = read_tensors(path)
    for name, tensor in whole.tensors.items():
        for how, other in forged(tensor):
            tensors = {**whole.tensors, name: other.contiguous()}
            header = dict(whole.metadata)
            header["state"] = json.dumps({key: describe(each) for key, each in tensors.items()})
            if name == "position" and other.dtype == torch.int64:
                header["tokens"] = json.dumps(other.tolist())
            yield f"{name}: {how}", tensors, header
    positions = [
        name for name, tensor in whole.tensors.items() if name.endswith("position") and tensor.dim() == 1
    ]
    for value in INTEGERS:  # all of them agree
        tensors = {
            **whole.tensors,
            **{name: torch.full_like(whole.tensors[name], value) for name in positions},
        }
        yield f"positions: {value}", tensors, {**whole.metadata, "tokens": json.dumps([value])}
    for word, values in WORDS.items():
        for value in values:
            yield f"{word}: {value}", dict(whole.tensors), {**whole.metadata, word: json.dumps(value)}
        yield f"without {word}", dict(whole.tensors), {k: v for k, v in whole.metadata.items() if k != word}


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    header = {name: text for name, text in header.items() if name != "checksum"}
    save_file(tensors, path, {**header, "checksum": memfile._checksum(tensors, header)})
