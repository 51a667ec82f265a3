"""The routes of memories: create, list, show, upload, download, fork, roll back, forget, delete."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from remanence.inference.sentences import StoredSentence
from remanence.serve import schemas
from remanence.serve.access import Access
from remanence.serve.database import Memory
from remanence.serve.errors import ApiError
from remanence.serve.gate import too_large
from remanence.serve.memories import Memories
from remanence.serve.openai import Key, Owner, response_id, version_id
from remanence.serve.schemas import MemoryInfo, StoredInfo, VersionInfo
from remanence.serve.service import Answered, Service, Turn, uncancelled

OCTETS = "application/octet-stream"
FILE: dict[str, Any] = {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
"""The content of a memory file, for the schema."""
LISTED = 1000
"""The largest number of stored sentences in one response."""


def describe(memories: Memories, memory: Memory) -> MemoryInfo:
    """What a response says about a memory."""
    head = memories.head(memory)
    return MemoryInfo(
        id=memory.id,
        name=memory.name,
        version=head.id,
        tokens=head.tokens,
        bytes=head.bytes,
        created_at=int(memory.created),
        updated_at=int(head.created),
    )


def stored_info(sentence: StoredSentence) -> StoredInfo:
    written = None if sentence.written is None else int(sentence.written.timestamp())
    return StoredInfo(text=sentence.text, written_at=written, similarity=sentence.similarity)


def any_version(identifier: str) -> str:
    """The identifier of a version, given by its own or that of its response."""
    return version_id(identifier) if identifier.startswith("resp_") else identifier


def router(service: Service, access: Access) -> APIRouter:
    routes = APIRouter(prefix="/v1/memories", tags=["Memories"])
    memories = service.memories

    @routes.post("", status_code=201, summary="Create an empty memory")
    def create(owner: Owner, body: schemas.CreateMemory | None = None) -> MemoryInfo:
        access.check_memories(owner)
        return describe(memories, memories.database.create(owner, None if body is None else body.name))

    @routes.get("", summary="List the memories")
    def list_all(owner: Owner) -> schemas.MemoryList:
        return schemas.MemoryList(
            data=[describe(memories, each) for each in memories.database.memories(owner)]
        )

    @routes.get("/{memory}", summary="Show a memory")
    def show(memory: str, owner: Owner) -> MemoryInfo:
        return describe(memories, memories.find(owner, memory))

    @routes.delete("/{memory}", summary="Delete a memory with all its versions")
    async def delete(memory: str, owner: Owner) -> schemas.Deleted:
        found = await asyncio.to_thread(memories.find, owner, memory)
        async with service.locked(owner, memory):
            await uncancelled(memories.delete, found)
        return schemas.Deleted(id=found.id)

    @routes.get("/{memory}/versions", summary="List the versions that are kept, the oldest first")
    def versions(memory: str, owner: Owner) -> schemas.VersionList:
        found = memories.find(owner, memory)
        return schemas.VersionList(
            data=[
                VersionInfo(
                    id=each.id,
                    response_id=response_id(each.id),
                    parent=each.parent,
                    is_newest=each.id == found.head,
                    tokens=each.tokens,
                    bytes=each.bytes,
                    created_at=int(each.created),
                )
                for each in memories.database.versions(found.id)
            ]
        )

    @routes.get("/{memory}/sentences", summary="List the stored sentences, or search them")
    def sentences(
        memory: str,
        owner: Owner,
        query: Annotated[str | None, Query(min_length=1, max_length=4096)] = None,
        limit: Annotated[int, Query(ge=1, le=LISTED)] = 50,
    ) -> schemas.StoredList:
        """Without `query`, the last ones, in the order in which they were read; with it, the most similar first."""
        check_lists_sentences()
        stored = memories.load(memories.head(memories.find(owner, memory))).sentences(query)
        shown = stored[-limit:] if query is None else stored[:limit]
        return schemas.StoredList(total=len(stored), data=[stored_info(each) for each in shown])

    @routes.get(
        "/{memory}/content",
        summary="Download a memory file",
        response_class=FileResponse,
        responses={200: FILE},
    )
    def download(memory: str, owner: Owner, version: str | None = None) -> Response:
        found = memories.find(owner, memory)
        chosen = found.head if version is None else any_version(version)
        known = memories.find_version(owner, chosen)
        if known.memory != found.id:
            raise ApiError(404, "not_found", "version: expected one of this memory, got another")
        if not known.bytes:
            raise ApiError(
                409,
                "empty",
                "memory: expected one that has read something, got an empty one, which has no file",
            )
        headers = {"X-Memory-Version": known.id, "Cache-Control": "no-store"}
        with ExitStack() as stack:
            path = stack.enter_context(memories.store.reading(known.id, known.bytes))
            opened = stack.pop_all()  # until the response is sent
        name = f"{known.id}.mem"
        return FileResponse(path, 200, headers, OCTETS, BackgroundTask(opened.close), name)

    @routes.put(
        "/{memory}/content",
        summary="Upload a memory file as the newest version",
        openapi_extra={"requestBody": {"required": True, **FILE}},
    )
    async def upload(memory: str, owner: Owner, request: Request) -> MemoryInfo:
        """The memory is created if it does not exist. The file is checked like any file of a stranger: nothing in it is
        executed, and one that does not fit the model is refused.
        """
        schemas.check_name(memory)
        found = await asyncio.to_thread(memories.find_existing, owner, memory)
        if found is None:
            access.check_memories(owner)
        with tempfile.TemporaryDirectory(prefix="upload-", dir=memories.uploads) as folder:
            path = Path(folder) / "memory.mem"
            access.check_bytes(owner, await save_body(request, path, access.limits.max_upload))
            async with service.locked(owner, memory):
                await uncancelled(check_and_upload, owner, memory, path)
        return await asyncio.to_thread(show, memory, owner)

    def check_and_upload(owner: str, memory: str, path: Path) -> None:
        session = memories.open_upload(path)
        memories.upload(memories.find_or_create(owner, memory), session)

    @routes.post("/{memory}/fork", status_code=201, summary="Create a memory that continues from a version")
    def fork(memory: str, owner: Owner, body: schemas.ForkMemory | None = None) -> MemoryInfo:
        access.check_memories(owner)
        found, body = memories.find(owner, memory), body or schemas.ForkMemory()
        version = memories.find_version(
            owner, found.head if body.version is None else any_version(body.version)
        )
        if version.memory != found.id:
            raise ApiError(404, "not_found", "version: expected one of this memory, got another")
        access.check_bytes(owner, version.bytes)
        return describe(memories, memories.fork(owner, version, body.name))

    @routes.post("/{memory}/rollback", summary="Make an earlier version the newest one again")
    async def rollback(memory: str, owner: Owner, body: schemas.Rollback) -> MemoryInfo:
        def move() -> MemoryInfo:
            version = memories.find_version(owner, any_version(body.version))
            memories.rollback(memories.find(owner, memory), version)
            return show(memory, owner)

        async with service.locked(owner, memory):
            return await uncancelled(move)

    @routes.post("/{memory}/forget", summary="Remove a stored sentence, and all versions that contain it")
    async def forget(memory: str, owner: Owner, body: schemas.Forget) -> schemas.StoredList:
        """Removes the sentence that the text is, the only one that contains it, or the one that is most similar to it;
        if none or several fit, nothing is removed. Earlier versions are deleted. Forks and downloads keep the sentence.
        """
        check_lists_sentences()
        async with service.locked(owner, memory):
            found = await asyncio.to_thread(memories.find, owner, memory)
            removed = await uncancelled(memories.forget, found, body.text)
        return schemas.StoredList(total=len(removed), data=[stored_info(each) for each in removed])

    @routes.post("/{memory}/read", summary="Read a text into a memory, without an answer")
    async def read(memory: str, owner: Owner, body: schemas.ReadText, key: Key = None) -> MemoryInfo:
        schemas.check_name(memory)
        turn = Turn(owner=owner, memory=memory, text=body.text, sampling={"max_tokens": 0}, key=key)
        async for event in service.answer(turn):
            assert not isinstance(event, Answered) or event.version is not None
        return await asyncio.to_thread(show, memory, owner)

    def check_lists_sentences() -> None:
        if not service.lists_sentences:
            raise ApiError(
                400,
                "unsupported",
                "model: expected one with a memory of sentences, got one without sentences to list",
            )

    return routes


async def save_body(request: Request, path: Path, most: int) -> int:
    """Write the body of a request to a file while it arrives, and return its size."""
    size = 0
    with open(path, "xb") as file:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large(most)
            await asyncio.to_thread(file.write, part)
    return size
