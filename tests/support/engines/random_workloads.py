"""Random workloads for the engine core (hypothesis): arrivals, aborts and page layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from manta.cluster.pages.kv_cache_groups import KVCacheGroup, count_pools
from manta.cluster.request.request import Request
from manta.cluster.step.executor import ExecutorInfo

from support.engines.cluster_checker import EOS, VOCAB, CheckedEngine, make_info, make_request

LAYOUTS = {
    "one group": (KVCacheGroup(),),
    "full and window": (KVCacheGroup(), KVCacheGroup(window=20)),
    "windows only": (KVCacheGroup(window=3), KVCacheGroup(window=8)),
    "full and window, with states": (KVCacheGroup(), KVCacheGroup(window=20)),
    "two pools": (KVCacheGroup(), KVCacheGroup(window=7), KVCacheGroup(1, window=13), KVCacheGroup(1)),
}
STEMS = tuple(tuple((7 * i + j) % (VOCAB - 2) + 2 for j in range(24)) for i in range(2))


@dataclass(frozen=True)
class Arrival:
    """A request, when it arrives, and when (if ever) it is aborted: before a step or within it.

    Another engine has generated its first `num_known` tokens, if there are more.
    """

    request: Request
    step: int
    abort_step: int | None
    abort_in_flight: bool
    num_known: int


@st.composite
def infos(draw: st.DrawFn, groups: tuple[KVCacheGroup, ...], **changes: Any) -> ExecutorInfo:
    """Facts of an executor with small pages and pools that some workloads exhaust."""
    page_size = draw(st.sampled_from((1, 2, 4)))
    pools = [sum(group.pool == pool for group in groups) for pool in range(count_pools(groups))]
    return make_info(
        page_size=page_size,
        num_pages=tuple(size * draw(st.integers(8, 20)) * 4 // page_size for size in pools),
        page_groups=groups,
        max_model_len=draw(st.integers(30, 60)),
        num_speculative_tokens=draw(st.integers(0, 6)),
        **changes,
    )


@st.composite
def arrivals(draw: st.DrawFn, index: int) -> Arrival:
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(1, len(stem)))] + tuple(draw(st.lists(st.integers(2, 4), max_size=4)))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 20)))
    request = make_request(
        f"r{index}",
        prompt,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 8)),
        ignore_eos=draw(st.sampled_from((True, True, False))),
        stop_token_ids=draw(st.sampled_from(((), (), (5,), (9, EOS[0]), EOS))),
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from((None, None, "alice"))),
        max_draft_tokens=draw(st.sampled_from((None, None, 0, 1, 3, 9))),
        background=draw(st.sampled_from((False, False, True))),
    )
    abort = draw(st.one_of(st.none(), st.none(), st.integers(0, 15)))
    num_known = draw(st.sampled_from((0, 0, 1, 5, 12)))
    return Arrival(request, draw(st.integers(0, 6)), abort, draw(st.booleans()), num_known)


def step(engine: CheckedEngine, leaving: dict[str, Arrival], aborted: set[str]) -> None:
    """Run one step, with aborts before it and while it (and the next ones) are in flight."""

    def leave(in_flight: bool) -> None:
        for request_id, arrival in leaving.items():
            if arrival.abort_in_flight is in_flight and engine.abort(request_id):
                aborted.add(request_id)
                assert not engine.abort(request_id), "an abort happens once"

    leave(in_flight=False)
    in_flight, maximum = engine.scheduler.in_flight, engine.executor.info.max_in_flight
    while len(in_flight) < maximum and (plan := engine.plan()) is not None:
        engine.submit(plan)
    if in_flight:
        leave(in_flight=True)
        engine.finish_step()
