"""The memory that CUDA graphs share, and the stream on which they are captured."""

from typing import Any

import torch


class GraphPool:
    """One pool for all graphs of a transport. They are replayed one after the other, so what one needs on its way may
    lie where another's lies.

    Torch gives a pool up with the last of its graphs, keeps its memory nevertheless, and refuses the pool from then
    on. So one graph, which does next to nothing, stays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: torch.cuda.CUDAGraph | None = None
        self.stream: Any = None
        self.handle: Any = None

    def open(self) -> "GraphPool":
        """Take a stream and a pool, the first time."""
        if self._kept is None:
            self.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self.handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                graph.capture_end()
            self._kept = graph
        return self
