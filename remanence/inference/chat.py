"""Formatting of a conversation, with the chat template of the tokenizer or as plain lines.

A template may come from an untrusted model folder. It is rendered in Jinja's sandbox, as in Hugging Face's libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from remanence.runtime.errors import first_line
from remanence.tokenizers.tokens import TEMPLATE, Tokenizer

PLACEHOLDER = "(an answer that is looked for)"
"""Stands for the model's answer when a template is rendered, to find the text that the template writes after
an answer.
"""


class Turns:
    """Formats each user message as the text that the model reads before it answers.

    The model has read all earlier turns, so the text only contains the end of the last answer and the new message.
    Without a chat template, a message starts on a new line and the answer follows it directly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words: Mapping[str, str] = getattr(tokenizer, "words", {})
        self.has_started = False

    def text(self, line: str) -> str:
        """Return the text that the model reads before it answers the message `line`."""
        text = self.conversation([{"role": "user", "content": line}], continues=self.has_started)
        self.has_started = True
        return text

    def conversation(self, messages: Sequence[Mapping[str, str]], *, continues: bool) -> str:
        """Return the text that the model reads before it answers the last of several messages, each with a `role` and
        a `content`. `continues` says whether they follow an answer that the model has generated.
        """
        if TEMPLATE not in self.words:
            return "".join(f"\n{message['content']}" for message in messages)
        if not continues:
            return self._render(messages)
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        _, found, text = self._render([*earlier, *messages]).partition(PLACEHOLDER)
        if not found:
            raise ValueError(
                "chat_template: expected one that writes the messages of the assistant, got one that does not"
            )
        return text

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render messages with the chat template, up to the start of the next answer."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = environment.from_string(self.words[TEMPLATE])
            return template.render(messages=list(messages), add_generation_prompt=True, **self.words)
        except Exception as error:  # a template can raise anything
            raise ValueError(f"chat_template: cannot be used ({first_line(error)})") from None
