"""Lines of a conversation as the text that a model reads: by the chat template of its tokenizer, or plain.

A template comes with a folder, which may be anyone's: it runs in Jinja's sandbox, as in Hugging Face's libraries, and
can do nothing but write text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from remanence.runtime.errors import first_line
from remanence.tokenizers.tokens import TEMPLATE, Tokenizer

ANSWER = "(an answer that is looked for)"
"""Stands for what the model has said, to find what a template writes behind it."""


class Turns:
    """The text before each answer. The model has read all that came before, so only what is new is made; what ends an
    answer comes with the next line. Without a template, a line begins on a new line and the answer goes on behind it,
    as in the texts that a model was trained on.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words: Mapping[str, str] = getattr(tokenizer, "words", {})
        self.begun = False

    def text(self, line: str) -> str:
        """What the model reads before it answers a line."""
        if TEMPLATE not in self.words:
            return f"\n{line}"
        said = {"role": "user", "content": line}
        if not self.begun:
            self.begun = True
            return self._render([said])
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, text = self._render([*earlier, said]).partition(ANSWER)
        if not found:
            raise ValueError(
                "chat_template: expected one that writes what an assistant says, got one without"
            )
        return text

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        room.globals["raise_exception"] = refuse
        room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = room.from_string(self.words[TEMPLATE])
            return template.render(messages=messages, add_generation_prompt=True, **self.words)
        except Exception as error:  # whatever a stranger's template does
            raise ValueError(f"chat_template: cannot be used ({first_line(error)})") from None
