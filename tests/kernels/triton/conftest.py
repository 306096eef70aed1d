"""Tests in `running/` launch kernels: on torch's default device if that is a GPU, or in Triton's interpreter."""

from __future__ import annotations

import torch

from polygraft_kernels.triton.numerics import INTERPRETED

CAN_RUN = INTERPRETED or torch.get_default_device().type == "cuda"

collect_ignore = [] if CAN_RUN else ["running"]
