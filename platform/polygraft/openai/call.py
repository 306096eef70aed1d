"""A call from its body to a job: everything that can be refused is refused here, before anything is sent or queued."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from polygraft.errors import ApiError
from polygraft.openai.catalog import ServedModel
from polygraft.openai.conversation import chat_conversation, completion_conversation
from polygraft.openai.formats import ChatFormat, CompletionFormat, Echo, Format, Head
from polygraft.openai.inference import Inference
from polygraft.openai.logprobs import CompletionLogprobsWriter
from polygraft.openai.params import chat_params, completion_params
from polygraft.openai.prompts import Prompt, chat_prompt, completion_prompts
from polygraft.openai.schemas import ChatBody, CompletionBody, SamplingBody
from polygraft.queue.messages import Job
from polygraft.registry.types import ResolvedModel
from polygraft.tenancy.principal import Principal
from polygraft_engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """An admitted call: its job, and how its answer is to be written."""

    job: Job
    resolved: ResolvedModel
    format: Format
    stream: bool
    include_usage: bool
    started: float
    """time.perf_counter() when the request arrived."""

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that tell what served the call, and how long it took until now."""
        headers = processing_time(self.started)
        if self.resolved.label is not None:
            headers["x-polygraft-adapter"] = self.resolved.label
        return headers


def processing_time(started: float) -> dict[str, str]:
    """OpenAI's header for the milliseconds since `started`."""
    return {"openai-processing-ms": str(round((time.perf_counter() - started) * 1000))}


async def chat_call(inference: Inference, principal: Principal, body: ChatBody, started: float) -> Call:
    """Admit a chat. Raises ApiError."""
    tenant = _tenant(principal)
    resolved = await inference.resolver.resolve(principal, body.model, chat_conversation(body))
    served = await inference.catalog.get(resolved.base)
    prompt = await chat_prompt(
        served,
        inference.renderer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    params = chat_params(body, served.card, prompt, _seed(inference, body))
    head = _head("chatcmpl", body)
    answer = ChatFormat(
        head, include_usage=body.include_usage, bytes_of=served.tokenizer.tokens if body.logprobs else None
    )
    job = _job(inference, tenant, resolved, head, [prompt], params)
    return Call(job, resolved, answer, body.stream, body.include_usage, started)


async def completion_call(inference: Inference, principal: Principal, body: CompletionBody, started: float) -> Call:
    """Admit a completion. Raises ApiError."""
    tenant = _tenant(principal)
    resolved = await inference.resolver.resolve(principal, body.model, completion_conversation(body))
    served = await inference.catalog.get(resolved.base)
    prompts = await completion_prompts(served, body)
    params = completion_params(body, served.card, prompts, _seed(inference, body))
    head = _head("cmpl", body)
    answer = CompletionFormat(
        head,
        include_usage=body.include_usage,
        new_writer=None if params.logprobs is None else partial(_writer, served, params.skip_special_tokens),
        n=body.n,
        echoes=[await _echo(served, prompt) for prompt in prompts] if body.echo else None,
    )
    job = _job(inference, tenant, resolved, head, prompts, params)
    return Call(job, resolved, answer, body.stream, body.include_usage, started)


def _tenant(principal: Principal) -> str:
    if principal.tenant_id is None:
        raise ApiError(
            403,
            "An operator's key belongs to no tenant and cannot run models.",
            type="permission_error",
            code="insufficient_scope",
        )
    return principal.tenant_id


def _seed(inference: Inference, body: SamplingBody) -> int:
    return inference.seeds() if body.seed is None else body.seed


def _head(kind: str, body: SamplingBody) -> Head:
    return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), body.model)


def _writer(served: ServedModel, skip_special_tokens: bool) -> CompletionLogprobsWriter:
    tokens = served.tokenizer.tokens
    return CompletionLogprobsWriter(tokens, lambda token: skip_special_tokens and tokens.is_special(token))


async def _echo(served: ServedModel, prompt: Prompt) -> Echo:
    return Echo(prompt.ids, await served.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text)


def _job(
    inference: Inference,
    tenant: str,
    resolved: ResolvedModel,
    head: Head,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> Job:
    return Job(
        id=head.id,
        model=resolved.base,
        tenant=tenant,
        gateway=inference.gateway_id,
        adapter=resolved.digest,
        adapter_name=resolved.label,
        prompts=tuple(prompt.ids for prompt in prompts),
        params=params,
        cache_namespace=tenant if resolved.shared_prefixes is None else resolved.shared_prefixes,
        submitted_at=time.time(),
    )
