"""torch's attention as libraries call it: held to one kernel, and by the names of its operators on CPUs."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def held_to(kernel: str, device: torch.device) -> AbstractContextManager[object]:
    """Torch's scaled_dot_product_attention by ``kernel`` alone; on CPUs by whatever serves."""
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([_BACKENDS[kernel]])


def attention_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's attention of (B, S, H, D) tensors, without copies to its own layout."""
    # looked up at every call: some libraries put their own in its place
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


@cache
def mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks, made once: every mesh makes groups, whose first use on GPUs takes long."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)
