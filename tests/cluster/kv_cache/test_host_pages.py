"""Places in host memory: none is lost or has two pages, and the page that is worth least gives up its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.kv_cache.host_pages import HostPages


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(host: HostPages, number: int, worth_s: float) -> int | None:
    place = host.begin_write(key(number), worth_s)
    if place is not None:
        host.end_write(key(number), has_moved=True)
    return place


@given(data=st.data())
def test_the_pages_that_are_worth_most_stay(data: st.DataObject) -> None:
    """Against a model that looks at all of them."""
    size = data.draw(st.integers(0, 6))
    host, worth, read, written = HostPages(size), dict[int, float](), list[int](), dict[int, float]()
    for now in range(data.draw(st.integers(0, 60))):
        number, worth_s = data.draw(st.integers(0, 9)), now + data.draw(st.integers(-20, 20)) + now / 1000
        match data.draw(st.sampled_from(("save", "save", "read", "end read", "end save"))):
            case "save" if number not in written:
                if host.renew(key(number), worth_s):
                    worth[number] = max(worth[number], worth_s)
                elif host.begin_write(key(number), worth_s) is not None:
                    if len(worth) + len(written) == size:
                        least = min(set(worth) - set(read), key=lambda each: worth[each])
                        assert worth.pop(least) < worth_s
                    written[number] = worth_s
                else:
                    assert len(worth) + len(written) == size
                    assert all(worth[each] >= worth_s for each in set(worth) - set(read))
            case "read" if number in worth:
                assert host.begin_read(key(number), worth_s) is not None
                worth[number] = max(worth[number], worth_s)
                read.append(number)
            case "end read" if read:
                host.end_read(key(read.pop()))
            case "end save" if written:
                number, worth_s = written.popitem()
                if data.draw(st.booleans()):
                    worth[number] = worth_s
                host.end_write(key(number), has_moved=number in worth)
            case _:
                pass
        assert [key(each) in host for each in range(10)] == [each in worth for each in range(10)]
        host.check_invariants()


def test_a_page_that_is_read_keeps_its_place() -> None:
    host = HostPages(1)
    assert write(host, 1, worth_s=0.0) == 0
    assert host.begin_read(key(1), 0.0) == 0
    assert write(host, 2, worth_s=9.0) is None
    host.end_read(key(1))
    assert write(host, 2, worth_s=9.0) == 0 and key(1) not in host


def test_a_page_is_not_taken_in_if_all_are_worth_more() -> None:
    host = HostPages(2)
    assert write(host, 1, worth_s=5.0) is not None and write(host, 2, worth_s=6.0) is not None
    assert write(host, 3, worth_s=4.0) is None
    assert host.renew(key(1), 9.0) and write(host, 3, worth_s=7.0) is not None
    assert key(1) in host and key(2) not in host
