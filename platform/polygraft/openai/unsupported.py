"""Fields of OpenAI's and vLLM's APIs that would change the answer and are not supported yet: refused by name, never
ignored. Fields that change nothing (metadata, store, service_tier, …) are simply not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from polygraft.errors import bad_request

_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Field → the values that ask for nothing; null always does."""

_RESPONSE_FORMATS = ("json_object", "json_schema")


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raise ApiError 400 that names the first field of `body` which asks for something that is not supported."""
    for name in sorted(_HARMLESS.keys() & body.keys()):
        value = body[name]
        if value is None or value in _HARMLESS[name]:
            continue
        if name == "response_format" and not _is_known_format(value):
            raise bad_request('`response_format` must be {"type": "text"}.', param=name)
        raise bad_request(f"`{name}` is not supported by this server.", param=name)


def _is_known_format(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") in _RESPONSE_FORMATS
