"""Page groups: which a model needs, how pools share memory, which pages sequences hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.config import EngineConfig
from manta.cluster.errors import UnprocessableError
from manta.cluster.kv_cache.prefix_cache import PagePool, PrefixCache
from manta.cluster.pages.kv_cache_groups import (
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    LayerPlace,
    plan_kv_cache,
    plane_width,
    share_pages,
)
from manta.cluster.step.limits import SchedulerConfig
from support.engines.cluster_checker import (
    CheckedEngine,
    longest,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)

FULL = KVCacheGroup()
LONG = {"ignore_eos": True}
PROMPT = tuple(2 + i * i % 19 for i in range(40))  # 10 pages of 4
windows = st.one_of(st.none(), st.integers(1, 40))


# Which groups a model needs.


@pytest.mark.parametrize(
    ("target", "drafter", "max_model_len", "groups"),
    [
        pytest.param([None] * 4, [None] * 2, 1000, (FULL,), id="models without windows share a group"),
        pytest.param(
            [None, 1000], [2000], 1000, (FULL,), id="windows that hold every sequence count as none"
        ),
        pytest.param([999], [], 1000, (KVCacheGroup(window=999),), id="a window of one token less counts"),
        pytest.param([64] * 3, [64], 1000, (KVCacheGroup(window=64),), id="models with one window share it"),
        pytest.param([None] * 3, [64] * 2, 1000, (FULL, KVCacheGroup(1, 64)), id="other windows are apart"),
        pytest.param([990, None], [], 1000, (FULL,), id="a window that saves little is widened"),
        pytest.param([900, 901], [], 1000, (KVCacheGroup(window=901),), id="windows that differ little join"),
    ],
)
def test_layers_with_the_same_window_are_one_group(
    target: list[int | None],
    drafter: list[int | None],
    max_model_len: int,
    groups: tuple[KVCacheGroup, ...],
) -> None:
    plan = plan_kv_cache(target, drafter, max_model_len)
    assert plan.groups == groups and plan.num_pools == 1 + groups[-1].pool
    assert plan.target == tuple(LayerPlace(0, plane) for plane in range(len(target)))
    last = len(groups) - 1
    assert plan.drafter == tuple(LayerPlace(last, plane) for plane in range(len(drafter)))
    assert plan.num_planes(plan.target, 0) == len(target)
    assert plan.num_planes(plan.drafter, groups[-1].pool) == len(drafter)


def test_five_sliding_layers_per_full_layer_make_six_groups_of_one_plane() -> None:
    plan = plan_kv_cache([4096] * 5 + [None], [], 32768)
    assert plan.groups == (FULL, *[KVCacheGroup(window=4096)] * 5) and plan.num_planes(plan.target, 0) == 1
    assert plan.target == tuple(LayerPlace(group, 0) for group in (1, 2, 3, 4, 5, 0))


def test_full_layers_set_the_number_of_planes_if_they_fill_them() -> None:
    pattern = [None if (i + 1) % 6 == 0 else 1024 for i in range(34)]  # 29 to 5
    plan = plan_kv_cache(pattern, [], 131072)
    assert plan.groups == (FULL, *[KVCacheGroup(window=1024)] * 6) and plan.num_planes(plan.target, 0) == 5
    assert [place.plane for place in plan.target if place.group == 0] == [0, 1, 2, 3, 4]
    assert [place.group for place in plan.target[:7]] == [1, 1, 1, 1, 1, 0, 2]
    assert plan.target[-1] == LayerPlace(6, 3), "the last group is not full"


def test_a_single_sliding_layer_leaves_no_planes_unused() -> None:
    plan = plan_kv_cache([None, None, 8, None, None], [], 100_000)
    assert plan.groups == (*[FULL] * 4, KVCacheGroup(window=8)) and plan.num_planes(plan.target, 0) == 1


def test_a_drafter_with_windows_has_a_pool_of_its_own() -> None:
    plan = plan_kv_cache([None] * 8, [2048] * 5 + [None], 32768)
    assert plan.groups == (FULL, KVCacheGroup(1), *[KVCacheGroup(1, 2048)] * 5)
    assert plan.num_planes(plan.target, 0) == 8 and plan.num_planes(plan.drafter, 1) == 1
    assert plan.drafter[0].group == 2 and plan.drafter[-1].group == 1


@given(st.lists(windows, min_size=1, max_size=12), st.lists(windows, max_size=6), st.integers(2, 50))
def test_every_layer_has_its_own_place_and_keeps_what_it_sees(
    target: list[int | None], drafter: list[int | None], max_model_len: int
) -> None:
    plan = plan_kv_cache(target, drafter, max_model_len)
    for pool, (layers, places) in enumerate(((target, plan.target), (drafter, plan.drafter))):
        assert len(set(places)) == len(places) == len(layers)
        for window, place in zip(layers, places, strict=True):
            group = plan.groups[place.group]
            kept = max_model_len if group.window is None else group.window
            assert kept >= min(max_model_len if window is None else window, max_model_len)
            assert group.pool == min(pool, plan.num_pools - 1)
    assert {place.group for place in (*plan.target, *plan.drafter)} == set(range(len(plan.groups)))
    assert (None in target) <= (plan.groups[0].window is None)


# Layers of several geometries.

GEMMA4_31B = [None if i % 6 == 5 else 1024 for i in range(60)]


def gemma4_31b(ranks: int = 1) -> list[KVCacheSpec]:
    """Return each layer's K/V on a rank: 16 heads of 256 if it slides, else 4 of 512."""
    wide, narrow = KVCacheSpec(16 // ranks, 256, 256), KVCacheSpec(max(4 // ranks, 1), 512, 512)
    return [narrow if window is None else wide for window in GEMMA4_31B]


def bytes_held(
    plan: KVCacheLayout, geometries: list[KVCacheSpec], num_tokens: int, page: int, rows: int
) -> int:
    plane_bytes = 2 * page * plane_width(plan.target, geometries)
    return plan.pages_per_sequence(num_tokens, page, rows)[0] * plan.num_planes(plan.target, 0) * plane_bytes


def test_two_layers_of_half_the_width_share_a_plane() -> None:
    wide, narrow = KVCacheSpec(2, 16, 16), KVCacheSpec(1, 16, 16)
    plan = plan_kv_cache([8, 8, None, None], [], 100, [wide, wide, narrow, narrow])
    assert plan.groups == (FULL, KVCacheGroup(window=8), KVCacheGroup(window=8))
    assert plan.target == (LayerPlace(1, 0), LayerPlace(2, 0), LayerPlace(0, 0, 0), LayerPlace(0, 0, 1))


def test_layers_with_one_window_share_a_group_only_if_their_heads_are_equal() -> None:
    kinds = [KVCacheSpec(4, 16, 16), KVCacheSpec(1, 64, 64)] * 2  # of one width, but not of one layout
    plan = plan_kv_cache([None] * 4, [], 100, kinds)
    assert plan.groups == (FULL, FULL) and [place.group for place in plan.target] == [0, 1, 0, 1]


def test_gemma_4_31b_holds_little_more_of_a_long_sequence_than_it_sees() -> None:
    """A token takes 819 KB in sliding layers and 82 KB in full ones: 29.5 GB at 32k if nothing were freed."""
    length, page, rows, kinds = 32768, 16, 2048, gemma4_31b()
    plan = plan_kv_cache(GEMMA4_31B, [], length, kinds)
    assert plan.num_pools == 1 and plan.num_planes(plan.target, 0) == 5, "no plane is unused"
    assert len(plan.groups) == 11 and {place.part for place in plan.target} == {0, 1}
    everything = 2 * length * sum(kind.width for kind in kinds)
    assert everything == pytest.approx(29.5e9, rel=0.01)
    seen = 2 * sum(kind.width * (window or length) for kind, window in zip(kinds, GEMMA4_31B, strict=True))
    assert seen == pytest.approx(3.5e9, rel=0.01)
    assert bytes_held(plan, kinds, length, page, rows=1) < 1.02 * seen, "while it decodes"
    # A prompt in chunks of 2048 rows holds each chunk in addition to the window.
    assert bytes_held(plan, kinds, length, page, rows) < seen + 1.02 * 2 * 50 * kinds[0].width * rows


def test_ranks_that_repeat_heads_have_their_own_page_layout() -> None:
    """Each of eight ranks has two sliding heads and a copy of one of four full ones: equal widths."""
    kinds = gemma4_31b(ranks=8)
    assert len({kind.width for kind in kinds}) == 1
    plan = plan_kv_cache(GEMMA4_31B, [], 32768, kinds)
    assert {place.part for place in plan.target} == {0} and plan.num_planes(plan.target, 0) == 10


@given(
    st.lists(
        st.tuples(windows, st.integers(1, 3), st.sampled_from([(4, 4), (8, 8), (6, 4)])),
        min_size=1,
        max_size=9,
    ),
    st.integers(2, 50),
)
def test_no_two_layers_share_a_value_of_a_token(
    layers: list[tuple[int | None, int, tuple[int, int]]], max_model_len: int
) -> None:
    kinds = [KVCacheSpec(heads, *sizes) for _, heads, sizes in layers]
    plan = plan_kv_cache([window for window, _, _ in layers], [], max_model_len, kinds)
    width, taken = plane_width(plan.target, kinds), set()
    assert width == max(kind.width for kind in kinds), "planes are no wider than a layer"
    for (window, _, _), kind, place in zip(layers, kinds, plan.target, strict=True):
        values = range(place.part * kind.width, (place.part + 1) * kind.width)
        mine = {(place.group, place.plane, value) for value in values}
        assert not mine & taken and values.stop <= width
        taken |= mine
        kept = plan.groups[place.group].window or max_model_len
        assert kept >= min(window or max_model_len, max_model_len)
    for group in range(len(plan.groups)):
        members = {kind for kind, place in zip(kinds, plan.target, strict=True) if place.group == group}
        assert len(members) == 1, "a group's layers are of one geometry"


# How much a sequence holds, and how pools share memory.


def test_a_window_holds_no_more_than_it_sees_plus_a_step() -> None:
    plan = KVCacheLayout((FULL, KVCacheGroup(window=20), KVCacheGroup(1, 8)), (), ())
    assert plan.pages_per_sequence(12, 4, 8) == (3 + 3, 3)
    assert plan.pages_per_sequence(400, 4, 8) == (100 + 8, 5)


MIXED = plan_kv_cache([None] * 4, [512] * 3 + [None], 4096)


def test_a_single_pool_gets_all_memory() -> None:
    plan = plan_kv_cache([None], [], 100)
    assert share_pages(plan, 16, 64, 8, 100, (7,), 1000) == (142,)


def test_pools_are_exhausted_together() -> None:
    sizes = (64, 16)
    for budget in (100_000, 300_000, 1_000_000):
        pages = share_pages(MIXED, 16, 256, 16, 4096, sizes, budget)

        def maximum(num_tokens: int) -> tuple[int, ...]:
            return MIXED.pages_per_sequence(num_tokens, 16, 256)

        def fits(num_tokens: int, memory: int = budget) -> bool:
            return 16 * sum(n * size for n, size in zip(maximum(num_tokens), sizes, strict=True)) <= memory

        length = max(n for n in range(1, 4097) if fits(n))
        assert all(have >= 16 * need for have, need in zip(pages, maximum(length), strict=True))
        first, second = (have / need for have, need in zip(pages, maximum(length), strict=True))
        assert first == pytest.approx(second, rel=0.02)


def test_every_pool_holds_the_longest_sequence_if_memory_allows() -> None:
    minimum = MIXED.pages_per_sequence(4096, 16, 256)
    sizes = (64, 16)
    tight = sum(n * size for n, size in zip(minimum, sizes, strict=True))
    assert share_pages(MIXED, 16, 256, 500, 4096, sizes, tight) == minimum
    roomy = share_pages(MIXED, 16, 256, 500, 4096, sizes, tight + 6400)
    assert all(have >= need for have, need in zip(roomy, minimum, strict=True)) and roomy != minimum


@given(
    st.lists(windows, min_size=1, max_size=6),
    st.lists(windows, max_size=3),
    st.integers(1, 6),
    st.integers(0, 20_000),
)
def test_pools_share_the_budget_whatever_it_is(
    target: list[int | None], drafter: list[int | None], max_num_seqs: int, budget: int
) -> None:
    plan = plan_kv_cache(target, drafter, 64)
    sizes = (30, 7)[: plan.num_pools]
    pages = share_pages(plan, 4, 10, max_num_seqs, 64, sizes, budget)
    cost = sum(n * size for n, size in zip(pages, sizes, strict=True))
    assert budget - sum(sizes) < cost <= budget
    minimum = plan.pages_per_sequence(64, 4, 10)
    if sum(n * size for n, size in zip(minimum, sizes, strict=True)) <= budget:
        assert all(have >= need for have, need in zip(pages, minimum, strict=True))


@given(
    st.lists(windows, min_size=1, max_size=4),
    st.lists(st.integers(0, 40), min_size=2, max_size=2),
    st.integers(1, 30),
)
def test_the_longest_sequence_is_the_longest_that_every_pool_holds(
    sees: list[int | None], num_pages: list[int], max_rows: int
) -> None:
    groups = (FULL, KVCacheGroup(1), *(KVCacheGroup(i % 2, window) for i, window in enumerate(sees)))
    info = make_info(page_groups=groups, num_pages=tuple(num_pages))
    config = EngineConfig(model="simulated", max_num_batched_tokens=max_rows)
    assert SchedulerConfig.derive(config, info).max_length == longest(info, max_rows)


# What is given back.


def hold(engine: CheckedEngine, group: int, slot: int = 0) -> tuple[int, int]:
    """Return the first and end index of the pages that a sequence holds."""
    books = engine.scheduler.kv_cache_manager
    return int(books.first_GS[group, slot]), int(books.end_GS[group, slot])


def test_a_long_sequence_holds_a_quarter_where_five_of_six_layers_have_a_window() -> None:
    length, chunk, page = 32768, 1024, 16
    layout = plan_kv_cache([4096] * 5 + [None], [], length)
    (planes,) = {layout.num_planes(layout.target, pool) for pool in range(layout.num_pools)}
    info = make_info(
        page_size=page, num_pages=(20_000,), page_groups=layout.groups, max_model_len=length, max_in_flight=2
    )
    engine = simulated_engine(info, max_num_batched_tokens=chunk)
    engine.add("r", (2 + i * i % 21 for i in range(length - 600)), max_tokens=600, **LONG)
    (pool,) = engine.scheduler.kv_cache_manager.pools
    shares, one_group = [], 6 * length
    while engine.has_unfinished:
        engine.step()
        held = planes * (pool.num_pages - pool.num_free) * page
        if engine.stats().running:
            shares.append((held / one_group, engine.stats().generation_tokens))
    prefill = [share for share, generated in shares if not generated]
    assert len(prefill) >= 30 and 0.24 < max(prefill) < 0.30
    assert 0.24 < shares[-1][0] < 0.30 and shares[-1][1] > 580
    assert max(shares)[0] < 0.30 and engine.stats().kv_usage == 0


def test_pages_are_freed_as_soon_as_no_row_sees_them_and_not_before() -> None:
    info = make_info(page_groups=(FULL, KVCacheGroup(window=6)), num_speculative_tokens=0)
    engine = open_engine(info, survival=[])
    engine.add("r", PROMPT[:3], max_tokens=30, **LONG)
    while engine.has_unfinished:
        plan = engine.next_plan()
        position = int(plan.num_computed[0])
        if position:
            seen = max(position - 5, 0) // 4  # the row at `position` sees 6 keys, its own included
            assert hold(engine, 1) == (seen, position // 4 + 1) and hold(engine, 0) == (0, position // 4 + 1)
        engine.submit(plan)
        engine.finish_step()


def test_with_drafts_in_flight_only_pages_before_every_outcomes_window_are_freed() -> None:
    info = make_info(page_groups=(KVCacheGroup(window=4),), num_speculative_tokens=4, max_in_flight=2)
    engine = open_engine(info, survival=[1.0] * 4)
    engine.add("r", PROMPT[:4], max_tokens=20, **LONG)
    first, second = engine.next_plan(), engine.next_plan()  # computes 0..3; then the anchor 4 and 4 drafts
    assert hold(engine, 0) == (0, 3)
    engine.submit(first, second)
    engine.finish_step()
    third = engine.next_plan()  # at 5 to 9: a row at 5 sees 2 and more, at 9 only 6 and more
    assert third.num_computed.tolist() == [-1] and hold(engine, 0)[0] == 0
    engine.submit(third)
    engine.finish_step()  # all were accepted: 9 is the anchor, the next row at 10 or later
    assert engine.next_plan() is not None and hold(engine, 0)[0] == 1


@pytest.mark.parametrize("num_pages", [8, 64])
def test_drafts_in_flight_do_not_exceed_a_windows_bound(num_pages: int) -> None:
    info = make_info(
        page_groups=(KVCacheGroup(window=2),), page_size=1, num_pages=(num_pages,), max_in_flight=3
    )  # 2 of the window, 5 of a step, 1: as much as one step's drafts lie ahead, not two steps'
    engine = open_engine(info, survival=[0.0] * 4, max_num_batched_tokens=5)
    engine.check_outputs(engine.add("r", PROMPT[:3], max_tokens=40, **LONG))
    assert engine.stats().preemptions == 0 and engine.stats().num_draft_tokens > 0


def test_a_single_long_prompt_does_not_exceed_its_windows_bound() -> None:
    for in_flight in (1, 2, 3):
        bound = 2 + 2 + 1  # window, step, and one that both touch
        groups = (FULL, KVCacheGroup(1, 8))
        info = make_info(page_groups=groups, num_pages=(16, bound), max_in_flight=in_flight)
        engine = open_engine(info, max_num_batched_tokens=8)
        engine.check_outputs(engine.add("r", PROMPT, max_tokens=20, **LONG))
        assert engine.stats().preemptions == 0
        assert engine.stats().steps < 5 + 20, "no chunk was cut"


def test_an_admitted_prompt_takes_no_more_pages_than_its_window_holds() -> None:
    engine = open_engine(make_info(page_groups=(FULL, KVCacheGroup(window=8))), max_num_batched_tokens=8)
    engine.add("r", PROMPT, max_tokens=2)
    plan = engine.next_plan()
    assert (hold(engine, 0), hold(engine, 1)) == ((0, 10), (0, 5))
    assert plan.page_groups.tolist() == [0] * 10 + [1] * 5
    assert plan.page_indices.tolist() == [*range(10), *range(5)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_pages", [(28, 64), (64, 12)])
def test_when_a_pool_is_exhausted_the_last_requests_are_recomputed_with_the_same_tokens(
    num_pages: tuple[int, int], in_flight: int
) -> None:
    groups = (FULL, KVCacheGroup(window=30), KVCacheGroup(1, 12))
    info = make_info(page_groups=groups, num_pages=num_pages, max_in_flight=in_flight)
    engine = open_engine(info, max_num_batched_tokens=16)
    engine.check_outputs(*(engine.add(f"r{i}", PROMPT[i : i + 8], max_tokens=20, **LONG) for i in range(4)))
    assert engine.stats().preemptions > 0 and engine.stats().kv_usage == 0
    assert list(engine.outputs.ends) == ["r0", "r1", "r2", "r3"], "who came first ends first"


def test_usage_is_that_of_the_fullest_pool() -> None:
    groups = (FULL, KVCacheGroup(1, 8))
    engine = open_engine(make_info(page_groups=groups, num_pages=(40, 10)), max_num_batched_tokens=8)
    engine.add("r", PROMPT[:4], max_tokens=30, **LONG)
    engine.run_step()
    assert engine.stats().kv_usage == pytest.approx(1 / 10)
    while hold(engine, 0)[1] < 9:
        engine.run_step()
    assert engine.stats().kv_usage == pytest.approx(
        max(9 / 40, (hold(engine, 1)[1] - hold(engine, 1)[0]) / 10)
    )


def test_a_request_that_one_of_the_pools_cannot_hold_is_refused() -> None:
    groups = (FULL, KVCacheGroup(1, 8))
    for num_pages in ((10, 64), (64, 4)):
        info = make_info(page_groups=groups, num_pages=num_pages)
        engine = open_engine(info, max_num_batched_tokens=8)
        with pytest.raises(UnprocessableError, match="K/V pages hold"):
            engine.add("r", PROMPT, max_tokens=2)


# What is found again.


class Known:
    """A cache over one pool per group that holds the given pages of a prompt."""

    def __init__(self, groups: tuple[KVCacheGroup, ...], pages_of: list[set[int]], count: int = 10) -> None:
        self.pools = [PagePool(count) for _ in groups]
        apart = tuple(KVCacheGroup(pool, group.window) for pool, group in enumerate(groups))
        self.cache = PrefixCache(self.pools, apart, 4)
        self.digests = [bytes([i]) * 16 for i in range(count)]
        for g, (pool, indices) in enumerate(zip(self.pools, pages_of, strict=True)):
            pages = pool.allocate(count)  # page i holds index i
            assert pages == list(range(count))
            self.cache.insert(g, [(self.digests[i], i) for i in sorted(indices)])
        self.cache.check_invariants()

    def hit(self) -> int:
        count, pages, _ = self.cache.match(self.digests)
        for g, group in enumerate(self.cache._groups):
            assert pages[g] == list(range(group.first_page(4 * count, 4), count))
        return count


TEN = set(range(10))


def test_a_prefix_is_found_without_the_old_pages_of_its_window() -> None:
    known = Known((FULL, KVCacheGroup(window=8)), [TEN, TEN])
    known.pools[1].release([*range(8)])
    known.pools[1].allocate(8)
    assert known.hit() == 10  # the row at 40 sees 33 and more: pages 8 and 9
    known.pools[1].release([8])
    known.pools[1].allocate(1)
    assert known.hit() == 0, "one of these is gone, too"
    known.cache.check_invariants()


@given(
    st.lists(
        st.tuples(windows, st.sets(st.integers(0, 9), max_size=3), st.booleans()), min_size=1, max_size=4
    )
)
def test_the_longest_prefix_that_is_complete_in_every_group_is_found(
    layout: list[tuple[int | None, set[int], bool]],
) -> None:
    sees = [window for window, _, _ in layout]
    pages_of = [TEN - few if lacks else few for _, few, lacks in layout]

    def is_complete(count: int) -> bool:
        return all(
            i in pages
            for window, pages in zip(sees, pages_of, strict=True)
            for i in range(count)
            if window is None or 4 * i + 3 > 4 * count - window  # its last position is seen by the next row
        )

    known = Known(tuple(KVCacheGroup(window=window) for window in sees), pages_of)
    assert known.hit() == max(count for count in range(11) if is_complete(count))


def test_a_repeated_prompt_is_found_by_what_its_windows_hold() -> None:
    groups = (FULL, KVCacheGroup(1, 8))
    for num_pages, cached in ((5, 0), (64, 20)):  # a pool that a lone prompt passes through, and a large one
        engine = open_engine(
            make_info(page_groups=groups, num_pages=(64, num_pages)), max_num_batched_tokens=8, survival=[]
        )
        engine.run(make_request("a", PROMPT, max_tokens=1))
        assert engine.run(make_request("b", (*PROMPT, 2, 3), max_tokens=1)).cached == {"b": 40}
        assert engine.run(make_request("c", PROMPT[:21], max_tokens=1)).cached == {"c": cached}


def test_a_running_prefix_is_shared_as_far_as_its_windows_reach() -> None:
    engine = open_engine(make_info(page_groups=(FULL, KVCacheGroup(window=8))), survival=[])
    engine.add("a", PROMPT, max_tokens=20, **LONG)
    engine.run_step()
    engine.add("b", (*PROMPT, 2), max_tokens=20, **LONG)
    plan = engine.run_step()
    assert plan.num_computed.tolist() == [40, 40] and hold(engine, 1, slot=1) == (8, 11)
    books = engine.scheduler.kv_cache_manager
    assert books.pages(1, 0)[:2] == books.pages(1, 1)[:2] and books.pages(0, 0)[:10] == books.pages(0, 1)[:10]
