from __future__ import annotations

from infra.ports import GIVEN_MAX, free_port


def test_a_port_is_given_once_until_whoever_got_it_had_time_to_listen() -> None:
    given = [free_port() for _ in range(GIVEN_MAX)]
    assert len(set(given)) == GIVEN_MAX
