"""What a tokenizer says about a chat and about the ends of sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from remanence.attached.sentences.config import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END, NEWLINE, OPENS, SPECIAL, SHORTENED, STOP = 1, 2, 4, 8, 16, 32
"""Flags of a token: it ends with a full stop, question mark or exclamation mark; contains a line break; can be the
first of a sentence; belongs to the chat format; is an initial or a title, behind which a full stop ends no sentence;
begins with a full stop.
"""

TITLES = (
    "Mr",
    "Mrs",
    "Ms",
    "Dr",
    "Prof",
    "St",
    "Mt",
    "Jr",
    "Sr",
    "Rev",
    "Gen",
    "Col",
    "Capt",
    "Lt",
    "Sgt",
    "Hon",
    "vs",
)

RECALL = "From memory:\n"
"""The text before recalled sentences."""

MARKS = {
    "<|im_start|>": ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "<|im_start|>system\n"),
    "<start_of_turn>": (
        "<start_of_turn>user\n",
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "<start_of_turn>user\n",
    ),
}
"""For each mark that starts a message: the texts before a user's message, before an answer, after a message, and before
recalled sentences.
"""


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat | None:
    """The token ids around messages; None if the tokenizer has no chat marks that are known."""
    encode = lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    for mark, (user, assistant, end, recall) in MARKS.items():
        if len(encode(mark)) == len(encode(end)) == len(encode("\n")) == 1:
            return ChatFormat(
                user=encode(user),
                assistant=encode(assistant),
                end=encode(end)[0],
                newline=encode("\n")[0],
                recall_start=encode(f"{end}\n{recall}{RECALL}"),
                recall_end=encode(f"{end}\n{assistant}"),
            )
    return None


def token_flags(tokenizer: PreTrainedTokenizerBase, size: int) -> np.ndarray:
    """The flags of every token ``[v]``."""
    flags = np.zeros(size, np.uint8)
    # Some tokenizers add plain text too: Gemma's adds line breaks.
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = set(tokenizer.all_special_ids) | added
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    for index, token in enumerate(tokens):
        if index in special:
            flags[index] = SPECIAL | OPENS
            continue
        text = (token or "").replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ")
        ends = text.rstrip("\"')*_\u201d\u2019")[-1:]
        flags[index] = (
            END * (ends in (".", "?", "!") and ends != "" and not is_shortened(text.rstrip(".")))
            | NEWLINE * ("\n" in text)
            | OPENS * (text[:1] in (" ", "\n"))
            | SHORTENED * is_shortened(text)
            | STOP * text.startswith(".")
        )
    return flags


def is_shortened(text: str) -> bool:
    """Whether the text of a token is an initial ("J") or a title ("Dr")."""
    word = text.removeprefix(" ")
    return word in TITLES or (
        len(word) == 1 and word != "I" and word.isalpha() and (word.isupper() or word != text)
    )
