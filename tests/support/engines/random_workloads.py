"""Random workloads for the engine core (hypothesis): arrivals, aborts and page layouts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.pages.kv_cache_groups import KVCacheGroup
from manta.cluster.request.request import Request

from support.engines.cluster_checker import EOS, VOCAB, Outputs, make_request

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


def step(engine: EngineCore, outputs: Outputs, leaving: dict[str, Arrival], aborted: set[str]) -> None:
    """Run one step, with aborts before it and while it (and the next ones) are in flight."""

    def leave(in_flight: bool) -> None:
        for request_id, arrival in leaving.items():
            if arrival.abort_in_flight is in_flight and engine.abort(request_id):
                aborted.add(request_id)
                assert not engine.abort(request_id), "an abort happens once"
        engine.check_invariants()

    leave(in_flight=False)
    scheduler, executor = engine._scheduler, engine._executor
    while len(scheduler.in_flight) < executor.info.max_in_flight and (plan := engine.plan()) is not None:
        engine.check_invariants()
        executor.submit(plan)
    if not scheduler.in_flight:
        return
    leave(in_flight=True)
    for update in engine.commit(executor.collect()):
        outputs.put(update)
    engine.check_invariants()
