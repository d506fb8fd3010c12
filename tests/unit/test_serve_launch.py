"""Starting and ending the processes of a server, with ranks that are small programs; and taking its port."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.port import address, bind
from chitu_diffusion.serving.stage import ServiceTable
from tests.unit.test_generate_launch import ALL_STARTED, CHILD, alive, pids

READY = "import pathlib; rank == 0 and pathlib.Path(os.environ['CHITU_GENERATE_STORE']).with_name('ready').touch()\n"
LATER = "time.sleep(1.0 if rank == 0 else 60); sys.exit(1)"


def run_ranks(folder: Path, body: str, size: int = 3) -> "subprocess.Popen[str]":
    """`launch.run` in a process of its own, with ranks that do ``body``."""
    code = (
        "import sys; from chitu_diffusion.commands.serve import launch\n"
        "launch.GRACE_S, launch.STOP_S = 0.3, 1.0\n"
        f"sys.exit(launch.run([sys.executable, '-c', {CHILD + body!r}, {str(folder)!r}], {size}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (READY + "rank and time.sleep(60)", 0, ""),
        ("rank == 2 and sys.exit(3); time.sleep(60)", 3, ""),
        (
            "rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)",
            1,
            "chitu: rank 1 of 3 was ended by signal 9 (SIGKILL); the other ranks were ended too\n",
        ),
        # once the server takes requests, rank 0 stays and tells
        (READY + "time.sleep(0.3); rank == 1 and os.kill(os.getpid(), 9)\n" + LATER, 1, ""),
        (
            READY + "time.sleep(0.3); rank == 0 and os.kill(os.getpid(), 9); time.sleep(60)",
            1,
            "chitu: rank 0 of 3 was ended by signal 9 (SIGKILL); the other ranks were ended too\n",
        ),
    ],
)
def test_a_server_ends_as_its_first_rank_ends_and_leaves_none(body: str, code: int, told: str, tmp_path: Path) -> None:
    server = run_ranks(tmp_path, ALL_STARTED + body)
    assert server.communicate(timeout=30) == ("", told)
    assert server.returncode == code
    assert not any(map(alive, pids(tmp_path)))


FIRST_ENDS_ALL = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if rank == 0 else 9))\n"


@pytest.mark.parametrize(("body", "code"), [(FIRST_ENDS_ALL, 0), ("", 128 + signal.SIGTERM)])
def test_a_signal_goes_to_the_first_rank_whose_exit_code_counts(body: str, code: int, tmp_path: Path) -> None:
    server = run_ranks(tmp_path, body + f"open({str(tmp_path)!r} + f'/{{rank}}-ready', 'w').close(); time.sleep(60)")
    end = time.monotonic() + 20
    while len(list(tmp_path.glob("*-ready"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    found = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    server.send_signal(signal.SIGTERM)
    assert server.communicate(timeout=30) == ("", "")
    assert server.returncode == code
    assert not any(map(alive, found))


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"service.port {port} on 127.0.0.1 cannot be taken: Address already in"):
            bind(ServiceTable(port=port))
    with bind(ServiceTable(port=port)) as taken:
        assert address(taken) == f"http://127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=r"on no\.such\.host\.invalid cannot be taken"):
        bind(ServiceTable(host="no.such.host.invalid"))
