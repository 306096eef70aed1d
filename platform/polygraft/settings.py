"""Every option, once. The only reader of the environment: POLYGRAFT_<NAME> sets what the command line leaves unset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from polygraft.errors import ConfigError, OptionError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: object) -> int:
    """Bytes from "2GiB", "512MiB", "1000" and the like. Raises ValueError that shows the accepted forms."""
    if isinstance(text, int):
        return text
    spelled = str(text).strip().upper()
    digits = spelled.rstrip("BIKMG ")
    unit = spelled[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is no size; write it like 2GiB, 512MiB or 1000000") from None


def _split(value: object) -> object:
    """Environment variables hold lists separated by commas, or as a JSON array where a value has a comma itself."""
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        return tuple(json.loads(value))
    return tuple(part for part in value.split(",") if part)


Size = Annotated[int, BeforeValidator(parse_size)]
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """The options of serve, gateway and worker. Frozen; parts of the program get the values they use, not this
    object.
    """

    model_config = SettingsConfigDict(
        env_prefix="POLYGRAFT_", frozen=True, extra="ignore", validate_default=True, use_attribute_docstrings=True
    )

    # what is served
    model: str = ""
    """A local folder or a Hub id."""
    served_model_name: str | None = None
    """The name clients use; default: the last part of the folder or Hub id."""
    adapter: Strings = ()
    """NAME=PATH, registered into the tenant `default` for as long as the option is there."""
    # where
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the API; 0 takes a free one."""
    metrics_port: int = Field(8001, ge=0, le=65535)
    """Port of the Prometheus listener; 0 takes a free one."""
    data_dir: Path = Path("polygraft-data")
    """Folder for the database, the key pepper, the blobs and the private queue server."""
    database_url: str | None = None
    """Default: SQLite in the data folder."""
    redis_url: str | None = None
    """Default: a private server on a Unix socket in the data folder."""
    blob_store: str | None = None
    """A folder, or s3://bucket/prefix; default: a folder in the data folder."""
    adapter_root: Strings = ()
    """Folders below which adapters may be loaded and imported from by path; default: none."""
    import_source: Strings = ()
    """Beginnings of hf:// and s3:// URLs that tenants may import adapters from, read with this server's own
    credentials; default: none.
    """
    max_adapter_size: Size = 4 << 30
    """Largest upload, and largest adapter once it is unpacked."""
    # who may call
    auth: Literal["keys", "none"] = "keys"
    """`none` serves anybody on this machine as the tenant `default`."""
    bootstrap_admin_key: str | None = None
    """The first admin key; default: a random one, printed once."""
    bootstrap_tenant_key: str | None = None
    """The first key of the tenant `default`; default: a random one, printed once."""
    key_pepper: str | None = None
    """Secret under which keys are hashed, equal on all gateways; default: a random one in the data folder."""
    # how the engine runs
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations; auto: bfloat16 for models saved in half precision, else float32."""
    kernels: Literal["auto", "reference", "native", "triton", "triton-invariant"] = "auto"
    """Backend of the maths; a backend asked for by name that cannot run is an error."""
    quantization: Literal["int8"] | None = None
    """Keep the base model's matrices in 8 bits, made while loading; adapters stay as they are. Default: off."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a worker; default: the machine's cores shared between the workers."""
    seed: int | None = None
    """Unseeded requests draw their seeds from this; default: from the system."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and output together, in tokens; default: what the model was made for."""
    max_num_seqs: int = Field(64, ge=1)
    """Most sequences in one step."""
    max_num_batched_tokens: int = Field(512, ge=1)
    """Most tokens in one step; longer prompts are computed in chunks."""
    block_size: int = Field(16, ge=1)
    """Tokens per block of the KV cache."""
    kv_cache_memory: Size | None = None
    """Size like 2GiB; default: 2 GiB, or 30% of the free memory if that is less."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike, within one tenant and adapter."""
    max_loras: int = Field(16, ge=1)
    """Most different adapters in one step; the base takes none."""
    max_cpu_loras: int = Field(256, ge=1)
    """Most adapters held in a worker's memory."""
    max_cpu_lora_memory: Size = 4 << 30
    """What they may take of it together, as they are held there."""
    max_lora_rank: int = Field(64, ge=1)
    """Largest rank of an adapter."""
    workers: int = Field(1, ge=1)
    """Worker processes."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, else one JSON object a line."""

    def environment(self) -> dict[str, str]:
        """These settings as POLYGRAFT_* variables, for a child process."""
        spelled: dict[str, str] = {}
        for name, value in self.model_dump(mode="json").items():
            if value is not None:
                spelled[f"POLYGRAFT_{name.upper()}"] = json.dumps(value) if isinstance(value, list) else str(value)
        return spelled

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other, with both numbers."""
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {self.max_cpu_loras} is less than --max-loras {self.max_loras}: "
                "every adapter in a slot is also held in host memory"
            )
        if self.auth == "none" and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"--auth none serves anybody who can connect, so it binds loopback only, not --host {self.host}"
            )


def _explain(problem: ErrorDetails) -> str:
    """One of pydantic's complaints in terms of the option."""
    option = f"--{problem['loc'][0]}".replace("_", "-")
    return f"{option} {problem['input']}: {problem['msg'].removeprefix('Value error, ')}"


def load(**options: Any) -> Settings:
    """Settings from the command line's `options` (None: not given) over the environment. Raises, in the caller's
    terms, OptionError for a malformed value and ConfigError for values that contradict each other.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise OptionError("; ".join(_explain(problem) for problem in error.errors())) from None
    except ValueError as error:
        raise OptionError(str(error)) from None
    settings.check()
    return settings
