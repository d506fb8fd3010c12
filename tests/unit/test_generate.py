"""`chitu generate` before torch is imported: what is typed, what is refused, files and their names."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chitu_diffusion.commands.generate.files import output_files, write_file
from chitu_diffusion.commands.generate.options import Asked, Job, check
from chitu_diffusion.models.media import encode
from chitu_diffusion.models.registry import MODELS, model
from chitu_diffusion.models.request import Result
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, ExitCode
from chitu_diffusion.parallel.groups import Lane
from tests.unit.test_generate_folder import make_folder

SUFFIX = {name: spec.suffix for name, spec in MODELS.items()}


def asked(tmp_path: Path, name: str = "wan", **typed: Any) -> Asked:
    folder = tmp_path / name
    plain = Asked(
        model=name,
        model_path=folder if folder.exists() else make_folder(folder, name),
        prompt="a fox",
        negative_prompt=None,
        height=None,
        width=None,
        frames=None,
        fps=None,
        steps=None,
        guidance=None,
        seed=0,
        num_images=1,
        dtype=None,
        output=tmp_path / f"out{SUFFIX.get(name, '.png')}",
        report=None,
        parallel={},
    )
    return replace(plain, **typed)


def checked(tmp_path: Path, world: int | None = None, **typed: Any) -> Job:
    return check(asked(tmp_path, **typed), {}, world)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_typed_comes_from_the_model(name: str, tmp_path: Path) -> None:
    job, usual = checked(tmp_path, name=name), MODELS[name].defaults
    (request,) = job.requests
    assert (request.height, request.width, request.frames) == (usual.height, usual.width, usual.frames)
    assert (request.steps, request.guidance, request.negative_prompt) == (
        usual.steps,
        usual.guidance,
        usual.negative_prompt,
    )
    assert job.files == (tmp_path / f"out{SUFFIX[name]}",)
    assert job.fps == MODELS[name].fps


def test_several_pictures_take_the_next_seeds(tmp_path: Path) -> None:
    job = checked(tmp_path, name="zimage", num_images=3, seed=7)
    assert [request.seed for request in job.requests] == [7, 8, 9]
    assert [file.name for file in job.files] == ["out-1.png", "out-2.png", "out-3.png"]


@pytest.mark.parametrize(
    ("world", "parallel", "lane"),
    [
        (None, {}, Lane(0, 1, 1)),
        (None, {"cp_size": 4}, Lane(0, 1, 4)),
        (None, {"cp_size": 2, "cfg_parallel": True}, Lane(0, 2, 2)),
        (None, {"cfg_parallel": True}, Lane(0, 2, 1)),
        (4, {}, Lane(0, 2, 2)),
        (4, {"cfg_parallel": False}, Lane(0, 1, 4)),
    ],
)
def test_the_ranks_follow_from_what_is_typed(
    world: int | None, parallel: dict[str, object], lane: Lane, tmp_path: Path
) -> None:
    assert checked(tmp_path, world, parallel=parallel).split.lane == lane


def test_no_second_lane_is_started_where_there_is_no_guidance(tmp_path: Path) -> None:
    job = checked(tmp_path, name="zimage", parallel={"cp_size": 2, "cfg_parallel": True})
    assert job.split.lane == Lane(0, 1, 2)
    assert "no guidance" in job.split.reason


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "flux"}, "model 'flux' is unknown; choose one of wan, qwen-image, zimage"),
    ({"prompt": " "}, "the prompt is empty"),
    ({"height": 100}, "height 100 is no multiple of 16, as wan needs; the nearest is 96"),
    ({"width": 0}, "width 0 is no multiple of 16, as wan needs; the nearest is 16"),
    ({"frames": 10}, "frames 10 is not 1 more than a multiple of 4; the nearest is 9"),
    ({"name": "zimage", "frames": 5}, "zimage makes pictures of one frame"),
    ({"name": "zimage", "fps": 8}, "--fps belongs to videos"),
    ({"fps": 0}, "--fps 0 cannot be"),
    ({"steps": 0}, "steps 0 cannot run"),
    ({"name": "qwen-image", "steps": 1}, "steps 1 cannot run, since qwen-image takes at least 2"),
    ({"guidance": -1.0}, "guidance -1 cannot be"),
    ({"guidance": float("nan")}, "guidance nan cannot be"),
    ({"seed": -1, "num_images": 2}, "seed -1 does not fit"),
    ({"seed": 2**63 - 1, "num_images": 2}, "seed 9223372036854775808 does not fit"),
    ({"num_images": 0}, "--num-images 0 cannot be"),
    ({"dtype": "float8"}, "--dtype 'float8' is unknown"),
    ({"output": Path("out.png")}, "wan makes .mp4 files"),
    ({"output": Path("no/such/out.mp4")}, "lies in a folder that does not exist"),
    ({"report": Path("/proc/no/r.json")}, "--report /proc/no/r.json lies in a folder that does not exist"),
    ({"report": Path("/")}, "is a folder"),
    ({"model_path": Path("no-such-folder")}, "the model folder no-such-folder does not exist"),
    ({"parallel": {"method": "agkv", "attention_mode": "ulysses"}}, "--attention-mode says ulysses"),
    ({"world": 3, "parallel": {"cp_size": 2}}, "--cp-size 2 asks for 2 ranks per sequence, but there are 3"),
]


@pytest.mark.parametrize(("typed", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_wrong_usage_is_one_sentence_before_weights_load(typed: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, **typed)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        ("--help", ExitCode.RIGHT, ""),
        (
            "--model wan --model-path {folder} --prompt x --height 100 --output {folder}/x.mp4",
            ExitCode.WRONG_USAGE,
            "chitu: height 100 is no multiple of 16, as wan needs; the nearest is 96\n",
        ),
    ],
)
def test_help_and_refusals_import_nothing_heavy(typed: str, code: ExitCode, told: str, tmp_path: Path) -> None:
    line = f"generate {typed.format(folder=make_folder(tmp_path / 'm'))}"
    program = (
        f"import sys; sys.argv = ['chitu', *{line.split()!r}]\n"
        "from chitu_diffusion.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'diffusers', 'transformers', 'numpy', 'av', 'PIL'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (code, "[]")
    assert ended.stderr == told


def test_a_launched_rank_that_is_refused_speaks_only_if_it_is_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from chitu_diffusion.commands import generate

    monkeypatch.setattr(generate, "REFUSED_S", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", "chitu: the prompt is empty; say what is to be seen\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert generate.run_generate(asked(tmp_path, prompt=""), []) == ExitCode.WRONG_USAGE
        assert capsys.readouterr().err == told


def test_files_in_a_folder_follow_the_highest_number(tmp_path: Path) -> None:
    spec = model("zimage")
    assert [f.name for f in output_files(tmp_path, spec, 2)] == ["zimage-0001.png", "zimage-0002.png"]
    (tmp_path / "zimage-0007.png").touch()
    (tmp_path / "wan-0009.mp4").touch()
    assert [f.name for f in output_files(tmp_path, spec, 1)] == ["zimage-0008.png"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    write_file(file, b"old")
    write_file(file, b"new")
    assert file.read_bytes() == b"new"
    with pytest.raises(CPError, match="No such file or directory"):
        write_file(tmp_path / "gone" / "a.png", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CPError, match="could not be written"):
        write_file(tmp_path / "folder", b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "folder"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(CPError, match=r"a\.png could not be written: No space left on device"):
        write_file(tmp_path / "a.png", b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_plain_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_file(tmp_path / "link", b"x")
    assert (tmp_path / "target").read_bytes() == b"x"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", b"y")
    assert os.read(reader, 8) == b"y"
    os.close(reader)


def pixels(frames: int) -> "np.ndarray":
    """A grey picture or video that gets lighter from frame to frame, with a red corner."""
    found = (
        np.full((frames, 32, 48, 3), 0.25, np.float32) + 0.1 * np.arange(frames, dtype=np.float32)[:, None, None, None]
    )
    found[:, :16, :16] = (1, 0, 0)
    return found


def test_a_picture_comes_back_from_its_file(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "a.png").write_bytes(encode(Result(pixels(1), (), 0), ".png", 1))
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), np.round(pixels(1)[0] * 255).astype(np.uint8))


def test_a_video_comes_back_from_its_file(tmp_path: Path) -> None:
    import av

    (tmp_path / "a.mp4").write_bytes(encode(Result(pixels(5), (), 0), ".mp4", 8))
    with av.open(tmp_path / "a.mp4") as container:
        assert container.streams.video[0].average_rate == 8
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == (5, 32, 48, 3)
    assert np.abs(frames[:, 20:, 20:] / 255 - pixels(5)[:, 20:, 20:]).max() < 0.03
    assert frames[0, 4, 4, 0] > 220 > 60 > frames[0, 4, 4, 1]


def test_pixels_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(CPError, match="values that are no numbers"):
        encode(Result(np.full((1, 8, 8, 3), np.nan), (), 0), ".png", 1)
