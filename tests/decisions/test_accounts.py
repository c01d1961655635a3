"""A partition's ledgers, record by record; in any interleaving of owners they are in `test_ledger_owners.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from decisions import recalled
from decisions.accounts import ANY_TIER, Accounts
from decisions.idempotency import KeyStanding
from decisions.recalled import RECALLED_RECORDS, TOLD_MAX, Standing
from schemas.events import Position
from schemas.parts import Keyed
from schemas.topics import BATCH, INTERACTIVE
from tests.decisions.ledger_site import saved
from tests.decisions.ledgers import admitted, ending, rejected
from tests.decisions.telling import NOTHING, RUNS, Q, R, in_all, let_in, restored, tell, told
from tests.decisions.worlds import NOW

# --- what the log tells ----------------------------------------------------------------------------------------------


def test_what_is_told_to_be_let_in_is_reserved_in_its_scopes() -> None:
    accounts = told(admitted(R, scopes=("", "key k1")))
    assert in_all(accounts) == in_all(accounts, scope="key k1") == RUNS
    assert in_all(accounts, tenant="other") == NOTHING
    assert set(accounts.tenants()) == {"acme"}


def test_an_ending_settles_to_what_was_used_once() -> None:
    accounts = told(admitted(R), ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)
    tell(accounts, ending("r", 50), ending("r", 70))
    assert in_all(accounts) == (0, 0, 1, 50)
    assert accounts.counters("acme")[""].tokens_total == 50


def test_what_never_started_is_charged_no_tokens() -> None:
    assert in_all(told(admitted(R), ending("r", None))) == (0, 0, 1, 0)


def test_an_admission_told_again_is_charged_once_whether_it_runs_or_has_ended() -> None:
    accounts = told(admitted(R), admitted(R))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50), admitted(R), ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_an_admission_told_again_is_charged_once_after_its_record_is_committed() -> None:
    accounts = told(admitted(R), ending("r", 50))
    saved(accounts, 1, NOW)
    tell(accounts, admitted(R))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_an_ending_told_before_its_admission_settles_it() -> None:
    accounts = told(ending("r", 50))
    assert in_all(accounts) == NOTHING
    tell(accounts, admitted(R))
    assert in_all(accounts) == (0, 0, 1, 50)
    tell(accounts, admitted(R), ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


@pytest.mark.parametrize("events", [(admitted(R), ending("r", 50)), (ending("r", 50), admitted(R))])
def test_an_id_has_one_stream_so_once_that_has_ended_another_record_of_it_reserves_nothing(events: Any) -> None:
    """No other ending would ever give it back."""
    accounts = told(*events, admitted(R, 1))
    assert in_all(accounts) == (0, 0, 1, 50)
    assert accounts.standing("acme", "r", 1)[0] is Standing.ENDED


def test_an_id_has_one_stream_so_while_it_is_open_another_record_of_it_reserves_nothing() -> None:
    accounts = told(admitted(R, 0), admitted(R, 1))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_the_first_owners_admission_and_the_seconds_late_refusal_take_nothing_back() -> None:
    accounts = told(admitted(R), rejected(R))
    assert in_all(accounts) == RUNS
    assert accounts.standing("acme", "r", 0) == (Standing.REDELIVERED, admitted(R))
    tell(accounts, ending("r", 50), rejected(R))
    assert in_all(accounts) == (0, 0, 1, 50)
    assert accounts.standing("acme", "r", 0) == (Standing.ENDED, admitted(R))


def test_what_a_late_refusal_came_before_is_let_in_all_the_same() -> None:
    accounts = told(rejected(R), admitted(R))
    assert in_all(accounts) == RUNS
    assert accounts.standing("acme", "r", 0) == (Standing.REDELIVERED, admitted(R))
    tell(accounts, rejected(R), admitted(R))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_a_refusal_and_a_late_one_of_the_same_record_are_one() -> None:
    accounts = told(rejected(R), rejected(R, message="in other words"))
    assert in_all(accounts) == NOTHING
    assert accounts.standing("acme", "r", 0) == (Standing.REDELIVERED, rejected(R))


def test_a_late_refusal_of_what_only_a_row_still_knows_takes_nothing_back() -> None:
    accounts = told(admitted(R))
    tell(accounts, None, first=RECALLED_RECORDS + 1)
    back = restored(saved(accounts, 1, NOW))
    tell(back, rejected(R), first=RECALLED_RECORDS + 2)
    assert in_all(back) == RUNS
    assert back.standing("acme", "r", 0) == (Standing.REPEATED, None)


@pytest.mark.parametrize("refusal_first", [True, False])
def test_what_was_let_in_and_whose_caller_heard_a_refusal_has_used_up_nothing(refusal_first: bool) -> None:
    """Its ending says so: the one that is told by the order in `tokens`."""
    verdicts = [rejected(R), admitted(R)] if refusal_first else [admitted(R), rejected(R)]
    refused_after_all = ending("r", 0, source="admission")
    accounts = told(*verdicts, refused_after_all)
    assert in_all(accounts) == NOTHING
    assert accounts.standing("acme", "r", 0) == (Standing.ENDED, admitted(R))
    accounts = told(refused_after_all, *verdicts)
    assert in_all(accounts) == NOTHING, "also where its ending is told first"


def test_a_key_is_free_once_its_request_was_refused_after_all() -> None:
    keyed = Keyed("k" * 64, "f" * 64)
    accounts = told(admitted(R, keyed=keyed), rejected(R))
    assert accounts.keys.standing("acme", keyed, NOW)[0] is KeyStanding.REPEAT
    tell(accounts, ending("r", 0, source="admission", reason="model_not_found"))
    assert accounts.keys.standing("acme", keyed, NOW)[0] is KeyStanding.NEW


def test_a_rejection_of_another_record_with_its_id_gives_nothing_back() -> None:
    """Else whoever writes a bad record with the id of what runs would have it for nothing."""
    for other in (rejected(R, 1), rejected(R, 0, source=None), rejected(R, 0, source=Position("requests.batch", 0, 0))):
        accounts = told(admitted(R, 0), other)
        assert in_all(accounts) == RUNS
        assert accounts.standing("acme", "r", 0) == (Standing.REDELIVERED, admitted(R, 0))


def test_a_rejection_after_the_ending_changes_nothing() -> None:
    accounts = told(admitted(R), ending("r", 50), rejected(R))
    assert in_all(accounts) == (0, 0, 1, 50)
    assert accounts.standing("acme", "r", 1) == (Standing.REPEATED, admitted(R)), "its stream is there to be read"


def test_what_was_refused_and_is_asked_again_is_counted() -> None:
    accounts = told(rejected(R, 0), admitted(R, 1))
    assert in_all(accounts) == RUNS
    assert accounts.standing("acme", "r", 1) == (Standing.REDELIVERED, admitted(R, 1))
    tell(accounts, rejected(R, 0), admitted(R, 0))
    assert in_all(accounts) == RUNS, "late words of the first"
    accounts = told(rejected(R, 0), admitted(R, 1), ending("r", 50), admitted(R, 0))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_a_refusal_of_another_partition_stands_in_no_ones_way() -> None:
    """What can't be read is refused wherever it is; its tenant's own partition has other offsets."""
    elsewhere = rejected(R, source=Position("requests.interactive", 5, 1_000_000))
    accounts = told(elsewhere, admitted(R, 0))
    assert in_all(accounts) == RUNS
    tell(accounts, rejected(Q, source=Position("requests.interactive", 5, 1_000_000)))
    assert accounts.standing("acme", "q", 1) == (Standing.NEW, None)


def test_a_refusal_of_another_partition_doesnt_hold_back_where_reading_starts() -> None:
    elsewhere = rejected(Q, source=Position("requests.interactive", 5, 1_000_000))
    accounts = told(elsewhere, admitted(R, 0))
    tell(accounts, None, first=RECALLED_RECORDS + 7)
    assert saved(accounts, 1, NOW)[-1].start == RECALLED_RECORDS + 8


def test_nothing_of_other_tiers_counts() -> None:
    """The same id may be asked on another tier, for little: what ends there gives nothing back here."""
    accounts = told(admitted(R, tier=BATCH), rejected(R, tier=BATCH), ending("r", 5, tier=BATCH))
    assert in_all(accounts) == NOTHING
    assert accounts.standing("acme", "r", 0) == (Standing.NEW, None)
    tell(accounts, admitted(R), rejected(R, tier=BATCH))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 5, tier=BATCH))
    assert in_all(accounts) == RUNS


def test_a_cancel_that_names_no_tier_ends_what_is_open_here() -> None:
    accounts = told(admitted(R), ending("r", 0, tier=ANY_TIER))
    assert in_all(accounts) == (0, 0, 1, 0)
    accounts = told(ending("r", 0, tier=ANY_TIER), admitted(R))
    assert in_all(accounts) == (0, 0, 1, 0), "also where its request is told after it"


def test_records_of_other_kinds_only_move_on() -> None:
    accounts = told(None, "what nobody can decode", first=7)
    assert accounts.next_offset == 9
    assert accounts.tenants() == {}


# --- what was decided here -------------------------------------------------------------------------------------------


def test_a_decision_counts_at_once_and_no_more_when_it_is_told() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    assert in_all(accounts) == RUNS
    tell(accounts, event)
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_a_decision_stands_until_it_is_told_though_its_ending_was_told_before() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == RUNS
    tell(accounts, event)
    assert in_all(accounts) == (0, 0, 1, 50)


def test_what_is_withdrawn_before_it_is_told_has_used_up_nothing_and_counts_once_it_is() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    accounts.withdraw(event)
    accounts.withdraw(event)
    assert in_all(accounts) == NOTHING
    tell(accounts, event)
    assert in_all(accounts) == RUNS
    accounts.withdraw(event)
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 0, source="admission"))
    assert in_all(accounts) == NOTHING


def test_the_same_decision_of_a_former_owner_is_charged_once() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    tell(accounts, admitted(R), event, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_what_a_former_owner_told_while_it_was_decided_here_is_charged_once() -> None:
    accounts = told(admitted(R))
    tell(accounts, let_in(accounts))
    assert in_all(accounts) == RUNS
    accounts = told(ending("r", 50), admitted(R))
    tell(accounts, let_in(accounts))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_what_a_former_owner_refused_late_holds_what_was_decided_here() -> None:
    accounts = Accounts(INTERACTIVE)
    event = let_in(accounts)
    tell(accounts, rejected(R))
    assert in_all(accounts) == RUNS
    assert accounts.standing("acme", "r", 0) == (Standing.REDELIVERED, event)
    tell(accounts, event)
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


def test_late_words_of_an_earlier_record_leave_a_decision_as_it_is() -> None:
    accounts = told(rejected(R, 0))
    event = let_in(accounts, offset=1)
    tell(accounts, rejected(R, 0), event, rejected(R, 0), admitted(R, 0))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 50))
    assert in_all(accounts) == (0, 0, 1, 50)


# --- what a record that asks is --------------------------------------------------------------------------------------


def test_a_record_that_comes_again_is_told_from_another_with_its_id() -> None:
    accounts = Accounts(INTERACTIVE)
    assert accounts.standing("acme", "r", 7) == (Standing.NEW, None)
    event = let_in(accounts, offset=7)
    for _ in ("decided", "told"):
        assert accounts.standing("acme", "r", 7) == (Standing.REDELIVERED, event)
        assert accounts.standing("acme", "r", 8) == (Standing.REPEATED, event)
        assert accounts.standing("other", "r", 7) == (Standing.NEW, None)
        tell(accounts, event)


def test_a_refusal_is_known_and_what_was_refused_before_it_too() -> None:
    accounts = told(rejected(R, 7))
    assert accounts.standing("acme", "r", 7) == (Standing.REDELIVERED, rejected(R, 7))
    assert accounts.standing("acme", "r", 8) == (Standing.REPEATED, rejected(R, 7))
    assert accounts.standing("acme", "r", 6) == (Standing.REDELIVERED, rejected(R, 7))


def test_what_is_let_in_at_a_second_try_isnt_decided_a_third_time() -> None:
    accounts = told(rejected(R, 7))
    event = let_in(accounts, offset=8)
    assert accounts.standing("acme", "r", 9) == (Standing.REPEATED, event)
    assert accounts.standing("acme", "r", 7) == (Standing.REPEATED, event)
    tell(accounts, event)
    assert accounts.standing("acme", "r", 9) == accounts.standing("acme", "r", 7) == (Standing.REPEATED, event)


def test_a_request_whose_ending_was_faster_is_not_decided() -> None:
    accounts = told(ending("r", 0))
    assert accounts.standing("acme", "r", 7) == (Standing.ENDED, None)
    tell(accounts, None, first=RECALLED_RECORDS - 1)
    assert accounts.standing("acme", "r", 7) == (Standing.ENDED, None)
    tell(accounts, None)
    assert accounts.standing("acme", "r", 7) == (Standing.NEW, None)


def test_what_is_open_in_a_row_alone_is_repeated() -> None:
    accounts = told(admitted(R))
    tell(accounts, None, first=RECALLED_RECORDS + 1)
    back = restored(saved(accounts, 1, NOW))
    assert back.standing("acme", "r", 0) == back.standing("acme", "r", 3) == (Standing.REPEATED, None)


def test_verdicts_have_a_limit() -> None:
    with mock.patch.object(recalled, "TOLD_MAX", 2):
        accounts = told(*(rejected(replace(R, request_id=f"r{number}"), number) for number in range(3)))
    found = [accounts.standing("acme", f"r{number}", number)[0] for number in range(3)]
    assert found == [Standing.NEW, Standing.REDELIVERED, Standing.REDELIVERED]
    assert TOLD_MAX > RECALLED_RECORDS
