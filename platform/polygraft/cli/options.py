"""Command-line options made from the settings: their names, types, defaults and help are written once, there."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from polygraft import settings
from polygraft.settings import Settings

SECRETS = frozenset({"bootstrap_admin_key", "bootstrap_tenant_key", "key_pepper"})
"""Set in the environment only: other users of a machine see command lines."""

WHERE = ("data_dir", "database_url", "redis_url", "blob_store")
LOGS = ("log_level", "log_format")
HTTP = (
    "host", "port", "metrics_port", "auth", "adapter", "adapter_root", "import_source", "max_adapter_size", "seed",
)  # fmt: skip
ENGINE = (
    "device", "dtype", "kernels", "quantization", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "block_size", "kv_cache_memory", "enable_prefix_caching", "max_loras", "max_cpu_loras",
    "max_cpu_lora_memory", "max_lora_rank",
)  # fmt: skip

MODEL_ARGUMENT = "model_argument"
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=Settings.model_fields["model"].description)]


def settings_command(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(settings, ...)` a typer function with an option for each named setting beside its own parameters.

    A parameter `model_argument` (a ModelArgument) that has a value is the setting `model`, as if given by --model.
    Raises ConfigError for settings that cannot be.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        chosen = {name: Settings.model_fields[name] for name in names}

        def run(**given: Any) -> None:
            mine = {parameter.name: given.pop(parameter.name) for parameter in own}
            positional = mine.pop(MODEL_ARGUMENT, None)
            if positional is not None:
                if given.get("model") not in (None, positional):
                    raise typer.BadParameter(f"two models are given: {positional} and --model {given['model']}")
                given["model"] = positional
            command(settings.load(**given), **mine)

        options = [_option(name, field) for name, field in chosen.items()]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
        return run

    return decorate


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _kind(field)
    flag = f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    # The value is None unless it is given, so the default is told in words.
    told = "" if field.default in (None, "", ()) else f" Default: {field.default}."
    option = typer.Option(*names, help=f"{field.description}{told}", show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _kind(field: FieldInfo) -> Any:
    """What typer is to parse. Sizes are left as text, which the settings read."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not types.NoneType)
    if get_origin(kind) is Annotated:
        return str
    return list[str] if get_origin(kind) is tuple else kind
