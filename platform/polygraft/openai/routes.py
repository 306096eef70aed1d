"""The tenant's API for text: HTTP in and out, nothing else. The rules are in the modules around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polygraft.errors import ApiError
from polygraft.openai.answer import WholeAnswer
from polygraft.openai.body import read_body
from polygraft.openai.call import Call, chat_call, completion_call, processing_time
from polygraft.openai.catalog import ServedModel
from polygraft.openai.inference import Inference
from polygraft.openai.prompts import chat_prompt, check_ids, encode
from polygraft.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from polygraft.openai.streaming import StreamedAnswer
from polygraft.registry.types import ModelEntry
from polygraft.tenancy.request import principal_of


def build_router(inference: Inference) -> APIRouter:
    """The routes over `inference`. Requests carry their Principal in `scope["state"]["principal"]`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        with _arrival(inference) as started:
            body = await read_body(request, ChatBody)
            call = await chat_call(inference, principal_of(request), body, started)
        return _answer(inference, call)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        with _arrival(inference) as started:
            body = await read_body(request, CompletionBody)
            call = await completion_call(inference, principal_of(request), body, started)
        return _answer(inference, call)

    @router.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        """The base models and the tenant's adapters."""
        entries = await inference.resolver.list_models(principal_of(request))
        return JSONResponse({"object": "list", "data": [_entry(entry) for entry in entries]})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> JSONResponse:
        """One of them, also by a name with a version or an alias."""
        return JSONResponse(_entry(await inference.resolver.describe(principal_of(request), name)))

    @router.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> JSONResponse:
        """The tokens of a text or of a conversation (vLLM's route)."""
        body = await read_body(request, TokenizeBody)
        served = await _served(inference, request, body.model)
        ids = await _tokens(inference, served, body)
        pieces = [_spelling(served, token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": served.card.max_model_len, "tokens": ids, "token_strs": pieces}
        )

    @router.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> JSONResponse:
        """The text of tokens, special ones included (vLLM's route)."""
        body = await read_body(request, DetokenizeBody)
        served = await _served(inference, request, body.model)
        check_ids(body.tokens, served.card, "tokens")
        return JSONResponse({"prompt": await served.tokenizer.decode(body.tokens)})

    return router


@contextmanager
def _arrival(inference: Inference) -> Iterator[float]:
    """Gives the time of arrival; a refusal within is timed and counted."""
    started = time.perf_counter()
    try:
        yield started
    except ApiError as error:
        error.headers.update(processing_time(started))
        inference.observer.outcome(None, error.status)
        raise


def _answer(inference: Inference, call: Call) -> Response:
    return StreamedAnswer(inference, call) if call.stream else WholeAnswer(inference, call)


async def _served(inference: Inference, request: Request, name: str) -> ServedModel:
    resolved = await inference.resolver.resolve(principal_of(request), name)
    return await inference.catalog.get(resolved.base)


async def _tokens(inference: Inference, served: ServedModel, body: TokenizeBody) -> tuple[int, ...]:
    if body.messages is None:
        assert body.prompt is not None
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await encode(served, body.prompt, special=special, param="prompt")
    prompt = await chat_prompt(
        served,
        inference.renderer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
        special=False if body.add_special_tokens is None else body.add_special_tokens,
    )
    return prompt.ids


def _spelling(served: ServedModel, token: int) -> str:
    spelled = served.tokenizer.tokens.token(token)
    return "" if spelled is None else spelled


def _entry(entry: ModelEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "model",
        "created": entry.created,
        "owned_by": entry.owned_by,
        "parent": entry.parent,
        "max_model_len": entry.max_model_len,
    }


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for /openapi.json; its $id is what its own references are relative to."""
    schema = {"$id": body.__name__, **body.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
