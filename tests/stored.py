"""Memories of a tiny model, for tests of the server's parts."""

import torch

from remanence import Model, preset
from remanence.serve.memories import UPLOADS, Memories
from remanence.serve.store import UrlStore


def small_model():
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "vocab_size": 257, "ffn": 16}
    return Model(preset("tiny", ("mag",), memory={"heads": 2, "chunk": 4}, **sizes)).eval()


def after(session, text):
    session.read(text)
    return session


def scratch(folder):
    """The folder of copies of memories in a folder."""
    (folder / UPLOADS).mkdir(parents=True, exist_ok=True)
    return folder / UPLOADS


def opened(model, folder, kind):
    """Memories in a folder, with files in it or at a URL of it."""
    store = UrlStore(f"file://{folder / 'files'}", scratch(folder)) if kind == "file://" else None
    return Memories(model, folder, store=store)
