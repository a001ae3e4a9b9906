"""Routing between replicas: properties, and prefix hits compared with random choice."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.fleet.router import (
    BLOCK_BYTES,
    LOAD_FACTOR,
    LOAD_SLACK,
    PrefixIndex,
    Router,
    hash_chain,
    rendezvous_replica,
)

prompts = st.lists(st.integers(0, 2), max_size=6).map(lambda parts: tuple(_chain(parts)))


def _chain(parts: Sequence[int]) -> list[int]:
    return hash_chain(b"".join(bytes([part]) * BLOCK_BYTES for part in parts))


@given(st.lists(prompts, max_size=30), prompts, st.integers(1, 12))
def test_a_hash_chain_is_found_up_to_its_last_known_block(
    seen: list[tuple[int, ...]], requested: tuple[int, ...], room: int
) -> None:
    known = PrefixIndex(room)
    for chain in seen:
        known.add(chain)
        assert known.match(chain) == min(len(chain), room), "what was just seen is known"
        assert len(known) <= room
    alone = [known.match(requested[i : i + 1]) for i in range(len(requested))]
    assert alone == sorted(alone, reverse=True), "a block is known only with those before it"
    assert known.match(requested) == sum(alone)


def test_equal_prefixes_share_blocks_unless_salts_differ() -> None:
    one, other = b"x" * 300 + b"one", b"x" * 300 + b"another one"
    assert hash_chain(one)[:2] == hash_chain(other)[:2]
    assert len(hash_chain(b"x" * (BLOCK_BYTES - 1))) == 0
    assert not set(hash_chain(one, "a")) & set(hash_chain(one, "b"))


loads = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1)


@given(st.lists(st.tuples(loads, prompts, st.none() | st.sampled_from(["s", "t"])), min_size=1, max_size=20))
def test_no_chosen_replica_is_far_more_loaded_than_the_least(
    requests: list[tuple[dict[str, float], tuple[int, ...], str | None]],
) -> None:
    router = Router()
    for there, chain, session in requests:
        choice = router.choose(there, chain, session)
        minimum = min(there.values())
        assert there[choice.replica] <= max(LOAD_FACTOR * minimum, minimum + LOAD_SLACK)
        if choice.reason == "session":
            assert session is not None and choice.replica == rendezvous_replica(session, there)
        if choice.reason == "load":
            assert choice.known_blocks == 0 and there[choice.replica] == minimum


@given(st.sets(st.text(min_size=1, max_size=4), min_size=2, max_size=8), st.text(max_size=8))
def test_a_session_moves_only_when_its_replica_is_removed(replicas: set[str], session: str) -> None:
    home = rendezvous_replica(session, dict.fromkeys(replicas))
    for gone in replicas - {home}:
        assert rendezvous_replica(session, dict.fromkeys(replicas - {gone})) == home


def test_a_removed_replica_is_forgotten() -> None:
    router, chain = Router(), _chain([1, 2, 3])
    first = router.choose({"a": 0, "b": 0}, chain)
    assert router.choose({"a": 0, "b": 0}, chain).reason == "prefix"
    router.remove_replica(first.replica)
    assert router.choose({"a": 0, "b": 0}, chain).reason == "load"


class Replica:
    """A replica in requests and blocks: its own prefix cache, and time for the missing blocks."""

    def __init__(self, cache_blocks: int) -> None:
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.cache_blocks = cache_blocks
        self.running: list[float] = []  # when each request ends
        self.hits = self.served = 0

    def serve(self, chain: Sequence[int], now_s: float, decode_s: float) -> None:
        hits = 0
        while hits < len(chain) and chain[hits] in self.cache:
            hits += 1
        for block in reversed(chain):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.cache_blocks:
            self.cache.popitem(last=False)
        self.hits += hits
        self.served += 1
        self.running.append(now_s + decode_s + 0.01 * (len(chain) - hits))


Choose = Callable[[dict[str, float], Sequence[int]], str]


def simulate(choose: Choose, seed: int, num_replicas: int = 4) -> tuple[int, float]:
    """Send 3,000 requests at a steady rate, with shared prompts of different popularity.

    Returns blocks found in prefix caches, and the ratio of the busiest replica's requests to the mean.
    """
    dice = random.Random(seed)
    heads = [bytes([i]) * (BLOCK_BYTES * dice.randint(8, 24)) for i in range(60)]
    popularity = [1 / (rank + 1) ** 0.7 for rank in range(len(heads))]
    replicas = {f"r{i}": Replica(cache_blocks=400) for i in range(num_replicas)}
    now_s = 0.0
    for _ in range(3000):
        now_s += dice.expovariate(30.0)
        for replica in replicas.values():
            replica.running = [end_s for end_s in replica.running if end_s > now_s]
        tail = dice.randbytes(BLOCK_BYTES * dice.randint(1, 4))
        chain = hash_chain(dice.choices(heads, popularity)[0] + tail)
        chosen = choose({name: float(len(r.running)) for name, r in replicas.items()}, chain)
        replicas[chosen].serve(chain, now_s, dice.uniform(0.2, 1.5))
    served = [replica.served for replica in replicas.values()]
    return sum(replica.hits for replica in replicas.values()), max(served) * num_replicas / sum(served)


@pytest.mark.parametrize("seed", range(3))
def test_routing_gives_half_more_prefix_hits_than_random_choice_at_equal_balance(seed: int) -> None:
    dice, router = random.Random(seed), Router()
    by_chance, _ = simulate(lambda loads, chain: dice.choice(list(loads)), seed)
    hits, busiest = simulate(lambda loads, chain: router.choose(loads, chain).replica, seed)
    print(f"{by_chance=} {hits=} {hits / by_chance:.2f} x, {busiest=:.3f}")
    assert hits >= 1.5 * by_chance
    assert busiest <= 1.2
