"""What the adapter routes take and answer. Moments are Unix seconds, as in OpenAI's objects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polygraft.db import AdapterAlias, AdapterVersion

MAX_SPLIT = 16
MAX_WEIGHT = 1_000_000
LARGEST_VERSION = 2**31 - 1
Status = Literal["validating", "ready", "failed"]
VersionNumber = Annotated[int, Field(ge=1, le=LARGEST_VERSION)]


def unix(moment: datetime) -> int:
    """Whole seconds since 1970."""
    return int(moment.timestamp())


class Body(BaseModel):
    """What a client sends: strict types, and no fields that would be ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SplitPart(Body):
    """A version and its share of the conversations, relative to the other weights."""

    version: VersionNumber
    weight: Annotated[int, Field(ge=0, le=MAX_WEIGHT)]


class AliasBody(Body):
    """PUT …/aliases/{alias}: one version, or several of which each conversation keeps one."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["version"]}, {"required": ["split"]}]})

    version: VersionNumber | None = None
    split: Annotated[list[SplitPart], Field(min_length=1, max_length=MAX_SPLIT)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.version is None) == (self.split is None):
            raise ValueError("must have exactly one of `version` and `split`")
        if self.split is not None:
            if len({part.version for part in self.split}) < len(self.split):
                raise ValueError("names a version twice in `split`")
            if not any(part.weight for part in self.split):
                raise ValueError("must have a weight above 0 in `split`")
        return self

    @property
    def parts(self) -> list[SplitPart]:
        """The split; a single version is a split of one."""
        if self.split is not None:
            return self.split
        assert self.version is not None
        return [SplitPart(version=self.version, weight=1)]


class RollbackBody(Body):
    """POST …/rollback: the version that the bare name is to serve."""

    version: VersionNumber


class ShareBody(Body):
    """PUT …/shares/{tenant}; may be left out."""

    share_prefix: bool | None = None
    """Whether all who call the lent adapter share cached prefixes of their prompts; left out: as it was."""


class VersionTarget(BaseModel):
    """An alias of one version."""

    version: int


class SplitTarget(BaseModel):
    """An alias of several versions."""

    split: list[SplitPart]


AliasTarget = VersionTarget | SplitTarget


def alias_target(alias: AdapterAlias) -> AliasTarget:
    """What the alias stands for, as a client would write it."""
    if len(alias.split) == 1:
        return VersionTarget(version=alias.split[0]["version"])
    return SplitTarget(split=[SplitPart.model_validate(part) for part in alias.split])


class _Described(BaseModel):
    """What the object of a version and that of an adapter tell in the same way."""

    id: str
    object: str
    name: str
    """The adapter's."""
    version: int
    digest: str | None
    status: Status
    status_reason: str | None
    base_model: str
    rank: int | None
    scale: float | None
    target_modules: list[str]
    size_bytes: int
    created_at: int
    warnings: list[str]


def description(version: AdapterVersion) -> dict[str, Any]:
    """What both objects tell of a version in the same way."""
    return {
        "version": version.version,
        "digest": version.digest,
        "status": version.status,
        "status_reason": version.status_reason,
        "base_model": version.base_model,
        "rank": version.rank,
        "scale": version.scale,
        "target_modules": version.target_modules,
        "size_bytes": version.size_bytes,
        "warnings": version.warnings,
    }


class VersionObject(_Described):
    """One version of an adapter. What validation finds is null until it has ended well."""

    object: Literal["adapter.version"] = "adapter.version"
    errors: list[dict[str, str]] | None
    """All that is wrong with a failed one: tensor or field, problem, hint."""
    source: str
    origin: str | None


def version_object(name: str, version: AdapterVersion) -> VersionObject:
    """The version as its owner sees it."""
    return VersionObject(
        id=version.id,
        name=name,
        created_at=unix(version.created_at),
        errors=version.errors,
        source=version.source,
        origin=version.origin,
        **description(version),
    )


class AdapterObject(_Described):
    """An adapter as its owner sees it: the version that the bare name serves or, before there is one, the newest."""

    object: Literal["adapter"] = "adapter"
    owned_by: str
    aliases: dict[str, AliasTarget]
    latest: VersionObject | None
    """A newer version that is being validated or has failed."""


class DeletedAdapter(BaseModel):
    """An adapter that is gone, until somebody restores it."""

    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    name: str
    deleted: Literal[True] = True


class AliasObject(BaseModel):
    """An alias after it was set."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    adapter: str
    target: AliasTarget


class DeletedAlias(BaseModel):
    """An alias that is gone."""

    object: Literal["adapter.alias.deleted"] = "adapter.alias.deleted"
    name: str
    adapter: str
    deleted: Literal[True] = True


class ShareObject(BaseModel):
    """An adapter that another tenant may call."""

    object: Literal["adapter.share"] = "adapter.share"
    adapter: str
    tenant_id: str
    tenant: str
    """The other tenant's name."""
    share_prefix: bool
    created_at: int


class DeletedShare(BaseModel):
    """An adapter that was taken back."""

    object: Literal["adapter.share.deleted"] = "adapter.share.deleted"
    adapter: str
    tenant_id: str
    tenant: str
    deleted: Literal[True] = True
