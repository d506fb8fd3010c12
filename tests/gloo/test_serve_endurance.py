"""A server holds after many requests what it held after a few."""

from tests.gloo.test_serve_support import Server
from tests.support.serve_endurance import LIMITS, endure

FEW, MANY = 30, 60  # the first ones fill caches: 4 shapes, with and without guidance, prompts of several lengths
ROOM_MIB = 6.0  # a picture that was kept would be 0.03 MiB, the tensors of a request about 1


def test_requests_in_a_row_leave_nothing_behind() -> None:
    server = Server("zimage", 2, limits=LIMITS)
    found = endure(server, MANY, (FEW, MANY))
    for few, many in zip(found[FEW], found[MANY], strict=True):
        assert (many.threads, many.files) == (few.threads, few.files)
        assert many.rss_mib - few.rss_mib < ROOM_MIB
    assert server.stop() == [0, 0]
