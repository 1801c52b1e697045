"""The kinds of rules. Each one yields the write guards that enforce it, as SQL that both databases understand."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

UniqueSets = tuple[tuple[str, ...], ...]
"""Each set of columns that is unique in a table."""

_EPOCH = re.compile(r"\bepoch\(([\w.]+)\)")


@dataclass(frozen=True, slots=True)
class WriteGuard:
    """Refuses an operation `when` (INSERT, UPDATE or DELETE) on a row of `table` for which `condition` holds.

    In a condition, `epoch(time)` stands for a time's seconds since 1970, for which each database has its own function.
    """

    name: str
    table: str
    when: str
    condition: str
    message: str

    def guards(self) -> Iterator["WriteGuard"]:
        yield self

    def render(self, epoch: str) -> str:
        """Return the condition in a database's dialect. `epoch`: its expression for the seconds of `{time}`."""
        return _EPOCH.sub(lambda match: epoch.format(time=match[1]), self.condition)


class TriggerRule(Protocol):
    """A rule about one table's rows."""

    @property
    def table(self) -> str: ...

    def guards(self) -> Iterator[WriteGuard]:
        """Yield the write guards that enforce the rule."""


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """The rows never change and are never deleted, not even by SQLite's REPLACE, which runs no delete trigger.

    Rows for which the SQL condition `expired` holds may be deleted; OLD is the row.
    """

    table: str
    unique: UniqueSets
    expired: str = ""

    def guards(self) -> Iterator[WriteGuard]:
        short = short_name(self.table)
        message = f"{short} is append-only"
        refused_if = f"NOT ({self.expired})" if self.expired else "1 = 1"
        yield WriteGuard(f"{short}_no_update", self.table, "UPDATE", "1 = 1", message)
        yield WriteGuard(f"{short}_no_delete", self.table, "DELETE", refused_if, message)
        yield _no_replace(self.table, self.unique, message)


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows are never deleted, except those for which the SQL condition `expired` holds; OLD is the row.

    SQLite's REPLACE deletes rows that equal the new one in a set of `unique` columns, so such an insert is refused. The
    table's `Frozen` rule refuses updates of these columns: UPDATE OR REPLACE would delete the other row, too.
    """

    table: str
    unique: UniqueSets
    expired: str = ""

    def guards(self) -> Iterator[WriteGuard]:
        short = short_name(self.table)
        refused_if = f"NOT ({self.expired})" if self.expired else "1 = 1"
        message = f"{short} rows are {'not deleted before they expire' if self.expired else 'never deleted'}"
        yield WriteGuard(f"{short}_no_delete", self.table, "DELETE", refused_if, message)
        yield _no_replace(self.table, self.unique, f"{short} rows are never replaced")


@dataclass(frozen=True, slots=True)
class Frozen:
    """The columns keep their values; `refused_if` is a further condition under which an update is refused.

    A column is a name, or for a nullable or JSON column an expression in which `{row}` stands for the row. The guard's
    name is `<table>_stays` unless `name` is given.
    """

    table: str
    columns: tuple[str, ...]
    message: str
    refused_if: str = ""
    name: str = ""

    def guards(self) -> Iterator[WriteGuard]:
        conditions = [_changed(column) for column in self.columns]
        if self.refused_if:
            conditions.append(self.refused_if)
        name = self.name or f"{short_name(self.table)}_stays"
        yield WriteGuard(name, self.table, "UPDATE", " OR ".join(conditions), self.message)


@dataclass(frozen=True, slots=True)
class FinalStates:
    """A row does not leave these states. `may_move`: it may move from one of them to another."""

    name: str
    table: str
    states: tuple[str, ...]
    message: str
    may_move: bool = False

    def guards(self) -> Iterator[WriteGuard]:
        states = sql_list(self.states)
        left = f"NEW.state NOT IN {states}" if self.may_move else "NEW.state <> OLD.state"
        yield WriteGuard(self.name, self.table, "UPDATE", f"OLD.state IN {states} AND {left}", self.message)


@dataclass(frozen=True, slots=True)
class InitialState:
    """A row does not return to this state."""

    name: str
    table: str
    state: str
    message: str

    def guards(self) -> Iterator[WriteGuard]:
        condition = f"OLD.state <> '{self.state}' AND NEW.state = '{self.state}'"
        yield WriteGuard(self.name, self.table, "UPDATE", condition, self.message)


@dataclass(frozen=True, slots=True)
class SetOnce:
    """The column keeps its first value that is not NULL."""

    name: str
    table: str
    column: str
    message: str

    def guards(self) -> Iterator[WriteGuard]:
        yield WriteGuard(self.name, self.table, "UPDATE", set_again(self.column), self.message)


@dataclass(frozen=True, slots=True)
class OnWrite:
    """One condition for both INSERT and UPDATE; the guards' names are `<name>_insert` and `<name>_update`."""

    name: str
    table: str
    condition: str
    message: str

    def guards(self) -> Iterator[WriteGuard]:
        for when in ("INSERT", "UPDATE"):
            yield WriteGuard(f"{self.name}_{when.lower()}", self.table, when, self.condition, self.message)


@dataclass(frozen=True, slots=True)
class FourEyes:
    """Requesters do not approve. Each person approves once, and only the requested digest.

    The state changes only with enough approvals, and in production with a break-glass action if the requester is only
    claimed. The `frozen` columns keep what was requested. `table` has the requests; `foreign_key` of the `approval`
    table refers to its primary key `key`. `approved`: SQL condition that the new state requires the approvals.
    `environment`: SQL of the request's environment. `by_services`: service tokens may request, and the requester is the
    token's responsible person.
    """

    table: str
    key: str
    approval: str
    foreign_key: str
    approved: str
    environment: str
    frozen: tuple[str, ...]
    by_services: bool = True

    def guards(self) -> Iterator[WriteGuard]:
        yield from self._approver_guards()
        yield from self._request_guards()

    def _approver_guards(self) -> Iterator[WriteGuard]:
        short = short_name(self.table)
        requested = f"SELECT 1 FROM {self.table} r WHERE r.{self.key} = NEW.{self.foreign_key}"  # noqa: S608  our own names only
        yield WriteGuard(
            f"{short}_second_person",
            self.approval,
            "INSERT",
            f"EXISTS ({requested} AND r.requester_person = NEW.person)",
            "the requester cannot approve the request",
        )
        yield WriteGuard(
            f"{short}_same_digest",
            self.approval,
            "INSERT",
            f"NOT EXISTS ({requested} AND r.plan_digest = NEW.plan_digest)",
            "an approval has the plan digest of its request",
        )
        yield WriteGuard(
            f"{short}_approver_is_person",
            self.approval,
            "INSERT",
            "NOT EXISTS (SELECT 1 FROM keyvault_operator o "
            "WHERE o.id = NEW.approver_id AND o.person = NEW.person AND o.is_active)",
            "an approval names the person of the approving operator, who is not disabled",
        )

    def _request_guards(self) -> Iterator[WriteGuard]:
        short = short_name(self.table)
        by_token = (
            " AND NOT EXISTS (SELECT 1 FROM keyvault_servicetoken t "
            "WHERE t.token_id = NEW.requested_via_id AND t.creator_person = NEW.requester_person)"
            if self.by_services
            else ""
        )
        yield WriteGuard(
            f"{short}_requester_is_person",
            self.table,
            "INSERT",
            "NOT EXISTS (SELECT 1 FROM keyvault_operator o "  # noqa: S608  our own names only
            f"WHERE o.id = NEW.requester_id AND o.person = NEW.requester_person){by_token}",
            "a request names the person of the requesting operator or service token",
        )
        counted = (
            f"{self.approved} AND NEW.approvals_needed > (SELECT count(*) FROM {self.approval} v "  # noqa: S608  our own names only
            f"WHERE v.{self.foreign_key} = NEW.{self.key} AND v.plan_digest = NEW.plan_digest "
            "AND v.person <> NEW.requester_person)"
        )
        yield from OnWrite(f"{short}_enough", self.table, counted, "the request has too few approvals").guards()
        needs_another = f"coalesce({self.environment}, '') <> 'sandbox'"
        if self.by_services:
            needs_another = f"({needs_another} OR NEW.requested_via_id IS NOT NULL)"
        yield WriteGuard(
            f"{short}_production_policy",
            self.table,
            "INSERT",
            f"NEW.approvals_needed < 1 AND {needs_another}",
            "a request in production or by a service requires a second person",
        )
        yield WriteGuard(
            f"{short}_claim_noted",
            self.table,
            "UPDATE",
            f"NEW.is_requester_claimed AND {self.approved} AND coalesce({self.environment}, '') <> 'sandbox' "  # noqa: S608  our own names only
            f"AND NOT EXISTS (SELECT 1 FROM keyvault_breakglass g WHERE g.subject = NEW.{self.key})",
            "an approved request of a claimed requester in production has a break-glass action",
        )
        columns = (
            self.key,
            "plan_digest",
            "approvals_needed",
            "requester_person",
            "is_requester_claimed",
            *self.frozen,
        )
        yield from Frozen(self.table, tuple(map(as_text, columns)), "the content of a request is immutable").guards()


def short_name(table: str) -> str:
    """Return the table's name without its app."""
    return table.split("_", 1)[1]


def as_text(column: str) -> str:
    """Return the expression that compares a column of any type, NULL included."""
    return f"coalesce(CAST({{row}}.{column} AS TEXT), '')"


def sql_list(values: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{value}'" for value in values) + ")"


def is_changed(column: str) -> str:
    """Return the condition that an update changes a column of any type, NULL included."""
    return _changed(as_text(column))


def set_again(column: str) -> str:
    """Return the condition that an update changes a column that was not NULL."""
    return f"OLD.{column} IS NOT NULL AND (NEW.{column} IS NULL OR NEW.{column} <> OLD.{column})"


def _changed(column: str) -> str:
    expression = column if "{row}" in column else f"{{row}}.{column}"
    return f"{expression.format(row='NEW')} <> {expression.format(row='OLD')}"


def _no_replace(table: str, unique: UniqueSets, message: str) -> WriteGuard:
    """Return the guard against a new row that equals an existing one in any of these sets of columns."""
    same = " OR ".join("(" + " AND ".join(f"t.{column} = NEW.{column}" for column in key) + ")" for key in unique)
    condition = f"EXISTS (SELECT 1 FROM {table} t WHERE {same})"  # noqa: S608  our own names only
    return WriteGuard(f"{short_name(table)}_no_replace", table, "INSERT", condition, message)
