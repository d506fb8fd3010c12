"""Four ranks as lanes of 1, 2 or 4: one request gets all of them, several share them, and every picture is right."""

from concurrent.futures import ThreadPoolExecutor

from tests.gloo.test_serve import pixels, same
from tests.gloo.test_serve_support import Server, kept


def test_lanes_of_every_width_make_the_same_pictures() -> None:
    one = kept("zimage", 1)
    server = Server("zimage", 4, scheduler={"policy": "elastic", "widths": [1, 2, 4]})
    wanted = {seed: pixels(one.image(seed=seed)) for seed in range(6)}
    widths = []
    for count in (1, 2, 6, 1):
        with ThreadPoolExecutor(count) as threads:
            answers = [threads.submit(server.image, seed=seed) for seed in range(count)]
            for seed, asked in enumerate(answers):
                answer = asked.result()
                assert same(pixels(answer), wanted[seed])
                widths.append(len(answer.json()["chitu"][0]["ranks"]))
    assert widths[0] == widths[-1] == 4
    assert {1, 2} & set(widths)
    assert server.stop() == [0] * 4
