"""Wan's transformer, with random weights, split over as many ranks as there are: on GPUs, or without any on CPUs.

Run it alone (`python examples/wrapper_wan.py`), or under a launcher:
`python -m torch.distributed.run --standalone --nproc-per-node=2 examples/wrapper_wan.py`.
"""

import os

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp


def join() -> torch.device:
    """The group of all ranks that the launcher started, or of this process alone, and this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


@torch.no_grad()
def main() -> None:
    """Compare one process with all ranks."""
    device = join()
    torch.manual_seed(0)  # the same weights and the same noise on every rank
    model = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=32, num_layers=2, ffn_dim=512)
    model = model.to(device).eval()
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 26, 34).to(device),  # 3 × 13 × 17 tokens
        "encoder_hidden_states": torch.randn(1, 20, 4096).to(device),
        "timestep": torch.tensor([500], device=device),
    }
    alone = model(**inputs).sample
    with enable_fast_cp(model) as handle:
        together = model(**inputs).sample
    off = float((together - alone).abs().max() / alone.abs().max())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks over {handle.choice.used} ({handle.choice.reason})")
        print(f"largest difference from one process: {off:.1e} of the largest value")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
