"""Routing between replicas: properties, and prefix hits compared with random choice."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.fleet.router import (
    BLOCK_BYTES,
    LOAD_FACTOR,
    LOAD_SLACK,
    MAX_LEFT_TIERS,
    TIER_WORTH,
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
tiers = st.fixed_dictionaries({replica: st.none() | st.sampled_from("xy") for replica in "abcdef"})
sessions = st.none() | st.sampled_from(["s", "t"])
requests = st.lists(st.tuples(loads, prompts, sessions), min_size=1, max_size=20)


def _with_tiers(tier_of: dict[str, str | None]) -> Router:
    router = Router()
    for replica, tier in tier_of.items():
        router.set_tier(replica, tier)
    return router


def _limit(there: dict[str, float]) -> float:
    return max(LOAD_FACTOR * min(there.values()), min(there.values()) + LOAD_SLACK)


@given(requests, tiers)
def test_no_chosen_replica_is_far_more_loaded_than_the_least(
    requests: list[tuple[dict[str, float], tuple[int, ...], str | None]], tier_of: dict[str, str | None]
) -> None:
    router, last_tier = _with_tiers(tier_of), dict[str | None, str]()
    for there, chain, session in requests:
        choice = router.choose(there, chain, session)
        assert there[choice.replica] <= _limit(there)
        if choice.reason == "session":
            assert session is not None
            of_tier = [each for each in there if tier_of[each] == last_tier.get(session, "none")]
            assert choice.replica == rendezvous_replica(session, dict.fromkeys(of_tier or there))
        if choice.reason == "load":
            assert choice.known_blocks == 0 and there[choice.replica] == min(there.values())
        if (tier := tier_of[choice.replica]) is not None:
            last_tier[session] = tier


@given(requests, tiers)
def test_without_a_session_the_most_that_a_replica_has_or_can_read_decides(
    requests: list[tuple[dict[str, float], tuple[int, ...], str | None]], tier_of: dict[str, str | None]
) -> None:
    router, seen = _with_tiers(tier_of), defaultdict[str | None, set[int]](set)
    for there, chain, _ in requests:
        cached = {each: len(seen[each] & set(chain)) for each in there}
        kept = {each: len(seen[tier] & set(chain)) if (tier := tier_of[each]) else 0 for each in there}
        worth = {each: cached[each] + TIER_WORTH * max(kept[each] - cached[each], 0) for each in there}
        choice = router.choose(there, chain)
        best = max(worth[each] for each in there if there[each] <= _limit(there))
        mine = choice.replica
        assert worth[mine] == best and choice.known_blocks == max(cached[mine], kept[mine])
        reason = "tier" if kept[mine] > cached[mine] else "prefix" if cached[mine] else "load"
        assert choice.reason == reason
        for owner in (mine, tier_of[mine]):
            seen[owner].update(chain)


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


@given(st.sets(st.text(min_size=1, max_size=3), min_size=4, max_size=8), st.text(max_size=8))
def test_a_session_stays_in_its_tier_when_its_replica_is_removed(names: set[str], session: str) -> None:
    replicas = sorted(names)
    router = _with_tiers({name: "xy"[place % 2] for place, name in enumerate(replicas)})
    chain = _chain([1, 2, 3])
    home = router.choose(dict.fromkeys(replicas, 0.0), chain, session).replica
    of_tier = set(replicas[replicas.index(home) % 2 :: 2]) - {home}
    router.remove_replica(home)
    without = dict.fromkeys(set(replicas) - {home}, 0.0)
    assert router.choose(without, chain, session).replica in of_tier
    overloaded = dict.fromkeys(without, 0.0) | dict.fromkeys(of_tier, LOAD_SLACK + 1.0)
    assert router.choose(overloaded, chain, session).replica not in of_tier


def test_a_new_replica_of_a_tier_is_preferred_to_one_that_must_compute() -> None:
    router, chain = _with_tiers({"a": "node 1", "b": "node 2"}), _chain([1, 2, 3])
    assert router.choose({"a": 0.0}, chain).reason == "load"
    router.remove_replica("a")
    assert router.choose({"b": 0.0}, []).reason == "load"
    router.set_tier("c", "node 1")
    choice = router.choose({"b": 0.0, "c": 3.0}, chain)
    assert (choice.replica, choice.reason, choice.known_blocks) == ("c", "tier", 3)
    assert router.choose({"b": 0.0, "c": 3.0}, chain).reason == "prefix"


def test_few_tiers_without_replicas_are_remembered() -> None:
    router, chain = Router(), _chain([1])
    for number in range(MAX_LEFT_TIERS + 1):
        router.set_tier("a", f"node {number}")
        router.choose({"a": 0.0}, chain)
        router.remove_replica("a")
    for number, reason in ((1, "tier"), (MAX_LEFT_TIERS, "tier"), (0, "load")):
        router.set_tier("a", f"node {number}")
        assert router.choose({"a": 0.0}, chain).reason == reason
        router.remove_replica("a")


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


def computed_blocks(seed: int, *, credits_tiers: bool) -> int:
    """Send turns of sessions to two nodes of two replicas, of which one is replaced now and then.

    Returns the blocks that are neither in the replica's prefix cache nor among the files of its node.
    """
    dice, router = random.Random(seed), Router()
    files, replicas = {"one": set[int](), "two": set[int]()}, dict[str, tuple[str, Replica]]()
    texts, num_computed, now_s = [b""] * 60, 0, 0.0
    for number in range(3000):
        if number % 150 == 0 and number:
            gone, (node, _) = next(iter(replicas.items()))
            del replicas[gone]
            router.remove_replica(gone)
        for node in files:
            while sum(of == node for of, _ in replicas.values()) < 2:
                name = f"{node}-{number}-{len(replicas)}"
                replicas[name] = node, Replica(cache_blocks=400)
                router.set_tier(name, node if credits_tiers else None)
        now_s += dice.expovariate(30.0)
        session = dice.randrange(len(texts))
        text = texts[session] if len(texts[session]) < 40 * BLOCK_BYTES else b""
        texts[session] = text + dice.randbytes(BLOCK_BYTES * dice.randint(1, 4))
        chain = hash_chain(texts[session])
        for _, replica in replicas.values():
            replica.running = [end_s for end_s in replica.running if end_s > now_s]
        loads = {name: float(len(replica.running)) for name, (_, replica) in replicas.items()}
        node, replica = replicas[router.choose(loads, chain, f"session {session}").replica]
        num_computed += len(set(chain) - files[node] - replica.cache.keys())
        files[node].update(chain)
        replica.serve(chain, now_s, dice.uniform(0.2, 1.5))
    return num_computed


@pytest.mark.parametrize("seed", range(3))
def test_less_is_computed_when_replicas_are_replaced_if_their_tiers_count(seed: int) -> None:
    without, found = (computed_blocks(seed, credits_tiers=credits_tiers) for credits_tiers in (False, True))
    print(f"{without=} {found=} {without / found:.2f} x")
    assert found < 0.9 * without
