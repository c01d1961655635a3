"""What a partition's ledgers save, and what a newcomer makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decisions.accounts import LAPSE_MS, SAVED_AGAIN_MS, Accounts
from decisions.recalled import RECALLED_RECORDS, Standing
from schemas.events import LedgerSaved
from schemas.topics import BATCH, INTERACTIVE
from tests.decisions.ledger_site import follow, saved
from tests.decisions.ledgers import TIMEOUT_MS, admitted, ending, rejected
from tests.decisions.telling import NOTHING, RUNS, Q, R, in_all, let_in, restored, tell, told
from tests.decisions.worlds import NOW


def test_nothing_is_saved_before_anything_is_told_and_the_mark_comes_last() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    assert saved(accounts, 0, NOW) == []
    tell(accounts, admitted(replace(Q, tenant="beta"), 1), event)
    assert [row.tenant for row in saved(accounts, 0, NOW)] == ["acme", "beta", ""]
    assert saved(accounts, 0, NOW) == []
    tell(accounts, ending("r", 50))
    assert [row.tenant for row in saved(accounts, 0, NOW)] == ["acme", ""]


def test_rows_that_werent_written_are_written_next_time() -> None:
    accounts = told(admitted(R))
    accounts.unsaved(accounts.save(0, NOW))
    assert [row.tenant for row in saved(accounts, 0, NOW)] == ["acme", ""]


def test_a_large_row_is_written_less_often_and_a_newcomer_reads_on_from_its_last_one() -> None:
    log = [admitted(R, 0), admitted(replace(Q, tenant="beta"), 1), admitted(Q, 2), ending("q", 60, "beta")]
    accounts = told(*log[:2])
    first = saved(accounts, 0, NOW)
    tell(accounts, *log[2:])
    young_ms = NOW + 2 * SAVED_AGAIN_MS - 1
    rows = saved(accounts, 0, young_ms, last=False)
    assert [row.tenant for row in rows] == ["beta", ""], "beta has nothing open"
    back = restored([*first, *rows])
    follow(back, [(NOW, event) for event in log], len(log), back.start)
    assert in_all(back) == in_all(accounts)
    assert [row.tenant for row in saved(accounts, 0, young_ms + 1, last=False)] == ["acme", ""]
    tell(accounts, ending("r", 50))
    assert [row.tenant for row in saved(accounts, 0, young_ms + 1, last=True)] == ["acme", ""]


def test_a_row_holds_what_is_told_and_not_what_was_only_decided() -> None:
    accounts = told(admitted(R, 0))
    let_in(accounts, Q, 1)
    rows = saved(accounts, 0, NOW)
    back = restored(rows)
    assert in_all(back) == RUNS
    tell(back, ending("r", 50), first=1)
    assert in_all(back) == (0, 0, 1, 50)
    assert in_all(accounts) == (2, 85, 2, 85), "saving changes nothing"


def test_of_several_rows_in_any_order_the_newest_holds() -> None:
    accounts = told(admitted(R, 0))
    old = saved(accounts, 0, NOW)
    tell(accounts, ending("r", 50), admitted(Q, 1))
    new = saved(accounts, 0, NOW)
    for rows in ([*old, *new], [*new, *old], [new[0], old[1], new[1], old[0]]):
        back = restored(rows)
        assert in_all(back) == (1, 5, 2, 55)
        follow(back, [(NOW, event) for event in (admitted(R, 0), ending("r", 50), admitted(Q, 1))], 3, back.start)
        assert in_all(back) == (1, 5, 2, 55)


def test_what_a_row_holds_isnt_counted_again_when_it_is_read_again() -> None:
    """An id that was asked again: what was told of it before the row is in the row."""
    log = [rejected(R, 0), ending("r", 0), admitted(Q, 1), admitted(Q, 1)]
    row = saved(told(admitted(R, 2), admitted(Q, 1)), 0, NOW)[0]
    back = restored([replace(row, through=len(log)), LedgerSaved("", INTERACTIVE, len(log), NOW, 0)])
    follow(back, [(NOW, event) for event in [*log[:3], rejected(Q, 1)]], len(log), back.start)
    assert in_all(back) == (2, 85, 2, 85)


def test_a_row_without_its_mark_holds_and_the_rest_is_read() -> None:
    log = [admitted(R, 0), admitted(replace(R, tenant="beta"), 1), ending("r", 50), ending("r", 60, "beta")]
    accounts = told(*log[:2])
    mark = saved(accounts, 0, NOW)[-1]
    tell(accounts, *log[2:])
    row = saved(accounts, 0, NOW)[0]
    assert row.tenant == "acme"
    back = restored([mark, row])
    follow(back, [(NOW, event) for event in log], 9, back.start)
    assert in_all(back) == (0, 0, 1, 50)


def test_of_a_tenant_without_a_row_all_that_is_read_counts() -> None:
    mark = LedgerSaved("", INTERACTIVE, 5, NOW, 3)
    back = restored([mark])
    assert back.start == 3
    tell(back, admitted(R, 0), None, admitted(Q, 1), first=3)
    assert in_all(back)[0] == 2
    assert back.standing("acme", "r", 0) == (Standing.REDELIVERED, admitted(R, 0))


def test_a_tenant_with_more_open_than_a_record_takes_is_read_from_its_last_row_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decisions.accounts.OPEN_SAVED_MAX", 1)
    accounts = told(None, admitted(R, 0), first=5)
    small = saved(accounts, 9, NOW)
    assert [row.tenant for row in small] == ["acme", ""]
    tell(accounts, admitted(Q, 1), first=7)
    tell(accounts, None, first=7 + 2 * RECALLED_RECORDS)
    (mark,) = saved(accounts, 9, NOW)
    assert (mark.through, mark.start) == (8 + 2 * RECALLED_RECORDS, 7)
    back = restored([small[0], mark])
    tell(back, admitted(Q, 1), first=7)
    assert in_all(back) == in_all(accounts)
    tell(accounts, ending("q", 5), first=8 + 2 * RECALLED_RECORDS)
    assert [row.tenant for row in saved(accounts, 9, NOW)] == ["acme", ""]


def test_which_door_watches_what_is_open_is_known_as_long_as_it_is_open_and_after_a_restart() -> None:
    accounts = told(admitted(R, door="a"), admitted(Q, 1))
    assert {name: one.door for name, one in accounts.opened("acme").items()} == {"r": "a", "q": ""}
    assert restored(saved(accounts, 9, NOW)).opened("acme") == accounts.opened("acme")
    tell(accounts, ending("r", 5))
    assert set(accounts.opened("acme")) == {"q"}
    assert not accounts.opened("nobody")


def test_with_which_key_something_was_asked_is_known_as_long_as_it_is_open_and_after_a_restart() -> None:
    accounts = told(admitted(R), admitted(replace(Q, key="other"), 1))
    for one in (accounts, restored(saved(accounts, 9, NOW))):
        ((tenant, opened),) = one.all_opened()
        assert (tenant, {name: held.key_id for name, held in opened.items()}) == ("acme", {"r": R.key, "q": "other"})
    tell(accounts, ending("r", 5), ending("q", 5))
    assert list(accounts.all_opened()) == []


def test_where_a_stream_is_is_known_while_it_is_open() -> None:
    accounts = told(admitted(R))
    here = admitted(R).reply
    assert accounts.reply_of("acme", "r") == here
    back = restored(saved(accounts, 9, NOW))
    assert back.reply_of("acme", "r") == here
    assert back.reply_of("acme", "nobody's") is None
    assert back.reply_of("nobody", "r") is None


def test_what_the_log_took_too_late_is_void() -> None:
    late = replace(admitted(R), valid_until_ms=NOW - 1)
    accounts = Accounts(INTERACTIVE)
    accounts.apply(0, NOW, late)
    assert in_all(accounts) == NOTHING
    assert accounts.standing("acme", "r", 0) == (Standing.NEW, None)
    accounts.apply(1, NOW, replace(late, valid_until_ms=NOW))
    assert in_all(accounts) == RUNS


def test_rows_of_other_tiers_are_passed_over() -> None:
    accounts = told(admitted(R))
    tell(accounts, None, first=3 * RECALLED_RECORDS)
    back = restored(replace(row, tier=BATCH) for row in saved(accounts, 1, NOW))
    assert (back.start, back.tenants()) == (0, {})


def test_reading_starts_where_what_isnt_committed_was_told() -> None:
    accounts = told(admitted(R, 5), None, rejected(Q, 6))
    tell(accounts, None, first=2 * RECALLED_RECORDS)
    assert saved(accounts, 5, NOW)[-1].start == 0
    assert saved(accounts, 6, NOW)[-1].start == 2
    rows = saved(accounts, 7, NOW)
    assert rows[-1].start == 2 * RECALLED_RECORDS + 1
    assert accounts.standing("acme", "q", 6) == (Standing.NEW, None)
    assert restored(rows).start == 2 * RECALLED_RECORDS + 1
    assert saved(accounts, 7, NOW) == []


def test_reading_starts_where_an_ending_was_told_whose_request_may_come() -> None:
    accounts = told(None, ending("r", 0), None)
    mark = saved(accounts, 9, NOW)[-1]
    assert (mark.start, mark.through) == (1, 3)
    back = restored([mark])
    follow(back, [(NOW, None), (NOW, ending("r", 0)), (NOW, None)], 3, back.start)
    assert back.standing("acme", "r", 0) == (Standing.ENDED, None)


def test_a_reservation_whose_ending_is_lost_is_charged_in_full() -> None:
    accounts = told(admitted(R, time_limit_ms=1_000))
    late_ms = R.at_ms + TIMEOUT_MS + 1_000 + LAPSE_MS
    tell(accounts, None, at_ms=late_ms - 1)
    saved(accounts, 1, NOW)
    assert in_all(accounts)[:2] == (1, 80)
    tell(accounts, None, at_ms=late_ms)
    rows = saved(accounts, 1, NOW)
    for one in (accounts, restored(rows)):
        counter = one.counters("acme")[""]
        assert (counter.running, counter.held, counter.tokens_total) == (0, 0, 80)
    tell(accounts, ending("r", 50))
    assert accounts.counters("acme")[""].tokens_total == 80
