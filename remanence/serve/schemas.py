"""Requests and responses, as JSON. Fields that are not known are refused, and so are values that would have no effect
although the client expects one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator

from remanence.tokenizers.tokens import utf8


def check_name(name: str) -> str:
    """Return the name of a memory. Raises an error if it cannot have this name."""
    if not name.isprintable() or not 0 < len(name) <= 256:
        raise ValueError("name: expected up to 256 printable characters, got others")
    return name


def _unicode(text: str) -> str:
    """The text with what is no character, as JSON may contain it, replaced."""
    return utf8(text).decode("utf-8", "replace")


Name = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(check_name)]
"""The name of a memory."""
Text = Annotated[str, AfterValidator(_unicode)]
FullText = Annotated[str, StringConstraints(min_length=1), AfterValidator(_unicode)]
"""A text of at least one character."""
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256)]
NAME = Field(
    default=None, description="The name or identifier of the memory; it is created if it does not exist."
)
IGNORED = Field(default=None, description="Accepted and not used.")


class Schema(BaseModel):
    """Base class of requests."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class TextPart(Schema):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Any = IGNORED
    logprobs: Any = IGNORED


class Message(Schema):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]
    name: Any = IGNORED
    refusal: None = None
    type: Literal["message"] = "message"
    id: Any = IGNORED
    status: Any = IGNORED

    def plain(self) -> dict[str, str]:
        """The message with its content as one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Schema):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Any = IGNORED


class TextFormat(Schema):
    """The format of an answer."""

    type: Literal["text"]


class Answering(Schema):
    """The fields that all requests for answers have."""

    model: str = Field(description="The name of the served model, as /v1/models lists it.")
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = None
    no_repeat: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="Length in tokens of phrases that may not occur twice; 0: no limit."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    user: Name | None = NAME
    metadata: Any = IGNORED
    service_tier: Any = IGNORED
    safety_identifier: Any = IGNORED
    prompt_cache_key: Any = IGNORED

    def fields(self, tokens: int | None, stop: str | list[str] | None = None) -> dict[str, Any]:
        """The fields of `Sampling` that the request sets."""
        found = {
            "max_tokens": tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "no_repeat": self.no_repeat,
            "stop": None if not stop else (stop,) if isinstance(stop, str) else tuple(stop),
            "seed": None if self.seed is None else self.seed % 2**62,
        }
        return {name: value for name, value in found.items() if value is not None}


Tokens = Annotated[int, Field(ge=1, le=2**16)]
Stop = (
    Annotated[str, StringConstraints(max_length=256)]
    | Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=16)]
)


class ChatRequest(Answering):
    """A request for an answer to a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = 1
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: Literal[False] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: Any = IGNORED
    reasoning_effort: Any = IGNORED
    store: Any = IGNORED
    verbosity: Any = IGNORED

    @field_validator("messages")
    @classmethod
    def _ends_with_user(cls, messages: list[Message]) -> list[Message]:
        return _checked(messages)


def _checked(messages: list[Message]) -> list[Message]:
    """The messages, if an answer can follow them."""
    if messages[-1].role != "user":
        raise ValueError(f"expected the last message to be the user's, got {messages[-1].role!r}")
    if not messages[-1].plain()["content"].strip():
        raise ValueError("expected a text in the last message, got an empty one")
    return messages


class CompletionRequest(Answering):
    """A request for a continuation of a text."""

    prompt: (
        Annotated[str, StringConstraints(min_length=1)]
        | Annotated[list[FullText], Field(min_length=1, max_length=1)]
    )
    max_tokens: Tokens | None = 16
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = 1
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None


class ResponseRequest(Answering):
    """A request for an answer that names what it continues."""

    input: (
        Annotated[str, StringConstraints(min_length=1)]
        | Annotated[list[Message], Field(min_length=1, max_length=4096)]
    )
    instructions: Text | None = None
    previous_response_id: Identifier | None = Field(
        default=None, description="The response to continue from; not the newest one: a branch of its memory."
    )
    max_output_tokens: Tokens | None = None
    store: bool | None = Field(default=True, description="Whether the memory is kept, without `user` too.")
    text: dict[Literal["format"], TextFormat] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    parallel_tool_calls: Any = IGNORED
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    background: Literal[False] | None = None

    @field_validator("input")
    @classmethod
    def _ends_with_user(cls, value: str | list[Message]) -> str | list[Message]:
        return value if isinstance(value, str) else _checked(value)

    def messages(self) -> list[dict[str, str]]:
        """The instructions and the input as messages."""
        own = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*own, {"role": "user", "content": self.input}]
        return [*own, *(each.plain() for each in self.input)]


class CreateMemory(Schema):
    """A request for a new, empty memory."""

    name: Name | None = Field(default=None, description="A name by which requests can refer to it.")


class ForkMemory(Schema):
    """A request for a new memory that continues from a version of this one."""

    name: Name | None = None
    version: Identifier | None = Field(default=None, description="The version; by default the newest.")


class Rollback(Schema):
    """A request to make an earlier version the newest one again."""

    version: Identifier


class Forget(Schema):
    """A request to remove one stored sentence."""

    text: Annotated[FullText, StringConstraints(max_length=4096)] = Field(
        description="The sentence, or words that it contains, or a question about it."
    )


class ReadText(Schema):
    """A text to read into a memory, without an answer."""

    text: FullText


# Responses.


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error, as in OpenAI's API."""

    error: ErrorBody


class MemoryInfo(BaseModel):
    """A memory."""

    id: str
    object: Literal["memory"] = "memory"
    name: str | None
    version: str
    tokens: int
    bytes: int
    created_at: int
    updated_at: int


class MemoryList(BaseModel):
    object: Literal["list"] = "list"
    data: list[MemoryInfo]


class VersionInfo(BaseModel):
    """A version of a memory."""

    id: str
    object: Literal["memory.version"] = "memory.version"
    response_id: str
    parent: str | None
    is_newest: bool
    tokens: int
    bytes: int
    created_at: int


class VersionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[VersionInfo]


class StoredInfo(BaseModel):
    """A stored sentence."""

    text: str
    written_at: int | None
    similarity: float | None = None


class StoredList(BaseModel):
    object: Literal["list"] = "list"
    total: int
    data: list[StoredInfo]


class Deleted(BaseModel):
    id: str
    object: Literal["memory.deleted"] = "memory.deleted"
    deleted: Literal[True] = True


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]
