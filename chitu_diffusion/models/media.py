"""Pictures and videos as bytes of a file."""

import io
from fractions import Fraction
from typing import TYPE_CHECKING

from chitu_diffusion.models.request import Result
from chitu_diffusion.parallel.cp.errors import CPError

if TYPE_CHECKING:
    import numpy as np

CRF = "18"  # x264's quality: hardly to be told from the original


def encode(result: Result, suffix: str, fps: int) -> bytes:
    """``result`` as the bytes of a .png, or of an .mp4 of ``fps`` frames per second.

    Raises CPError where its pixels are not numbers: the model has computed nothing that can be shown.
    """
    import numpy as np

    assert result.pixels is not None, "only a rank that has decoded encodes"
    if not np.isfinite(result.pixels).all():
        raise CPError("the model computed values that are no numbers; take more steps, or another dtype")
    frames = np.round(result.pixels.clip(0, 1) * 255).astype(np.uint8)
    return _ENCODERS[suffix](frames, fps)


def _png(frames: "np.ndarray", fps: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frames[0]).save(file, format="png")
    return file.getvalue()


def _mp4(frames: "np.ndarray", fps: int) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": CRF})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


_ENCODERS = {".png": _png, ".mp4": _mp4}
