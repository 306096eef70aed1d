"""PEFT folders to checked, immutable adapter weights."""

from polygraft_adapters.folder import describe_model_folder_problem
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.types import (
    TARGETS,
    AdapterError,
    AdapterInfo,
    ModuleKey,
    ModuleShapes,
    Problem,
)

__all__ = [
    "TARGETS",
    "AdapterError",
    "AdapterInfo",
    "ModuleKey",
    "ModuleShapes",
    "Problem",
    "describe_model_folder_problem",
    "inspect_adapter",
]
