"""Identifiers are unique, from any thread and in any process, and sorted by time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from holdfast import ids


def test_ids_of_many_threads_are_unique() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [one for batch in pool.map(lambda _: [ids.run_id() for _ in range(2000)], range(8)) for one in batch]
    assert len(set(made)) == 16_000
    assert all(len(one) == 29 and one.startswith("r_") for one in made)


def test_a_forked_child_makes_other_ids() -> None:
    ids.message_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, " ".join(ids.message_id() for _ in range(50)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        theirs = set(pipe.read().decode().split())
    os.waitpid(child, 0)
    assert len(theirs) == 50
    assert not {one[-16:] for one in theirs} & {ids.message_id()[-16:] for _ in range(600)}


def test_later_ids_sort_after_earlier_ones() -> None:
    earlier = ids.node_id()[:13]
    assert earlier <= ids.node_id()[:13]


def test_secrets_have_160_random_bits() -> None:
    assert len(ids.secret()) == len("hf_") + 32
    assert ids.secret() != ids.secret()
