"""Small models of every variant, for the tests of everything that takes a model."""

import json

import torch

from remanence import Model, ModelConfig
from remanence.mixers import BLOCKS
from remanence.tokenizers.tokens import JsonTokenizer, byte_level_json

VARIANTS = {name: (name,) for name in BLOCKS} | {
    "hybrid": ("lmm", "window", "mac"),
    "attention hybrid": ("gated_delta", "attention"),
    "both memories": ("lmm", "knn"),
    "one store, rare tokens": ("knn", "knn"),
    "surprising tokens": ("knn", "window"),
}
STORES = {
    "knn": {},
    "both memories": {"write": "random", "fraction": 0.5, "neighbours": 1},
    "one store, rare tokens": {
        "shared": True,
        "fuse": "joint",
        "write": "rare",
        "fraction": 0.6,
        "evict": "importance",
    },
    "surprising tokens": {"write": "surprise", "fraction": 0.4, "search": "dense"},
}
"""The variants with kNN layers, and what is special about their stores, which hold 12 pairs."""

MEMORIES = {
    name: pattern for name, pattern in VARIANTS.items() if name not in ("attention", "window", "conv_window")
}


def config(variant="mac", **fields):
    memory = {"heads": 2, "chunk": 4, "expansion": 2.0, **fields.pop("memory", {})}
    depth = max(2, len(VARIANTS[variant]))
    own = {
        "vocab_size": 11,
        "dim": 16,
        "num_layers": depth,
        "heads": 2,
        "window": 5,
        "segment": 8,
        "persistent": 3,
    }
    knn = {"k": 3, "size": 12, **STORES.get(variant, {}), **fields.pop("knn", {})}
    return ModelConfig(**{**own, "pattern": VARIANTS[variant], "memory": memory, "knn": knn, **fields})


def model(variant="mac", dtype=torch.float64, **fields):
    torch.manual_seed(3)
    made = Model(config(variant, **fields)).to(dtype)
    for name, parameter in made.named_parameters():
        if ".features.down" in name:  # as if trained: they start as nothing
            torch.nn.init.normal_(parameter)
    if made.log_unigrams is not None:
        made.log_unigrams.copy_(torch.randn_like(made.log_unigrams).log_softmax(0))
    return made


def tokens(batch=2, count=29, vocabulary=11):
    return torch.randint(vocabulary, (batch, count))


def pairs_tokenizer(path):
    """A tokenizer.json of bytes and one pair of them, 258 tokens; the last one ends a text."""
    data = byte_level_json()
    data["model"]["vocab"]["me"], data["added_tokens"][0]["id"] = 256, 257
    data["model"]["merges"] = [["m", "e"]]
    path.write_text(json.dumps(data))
    return JsonTokenizer(path, "<|end|>")
