"""Conditions that limit rows to the operator's scope."""

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q, Value
from django.db.models.expressions import Func
from django.db.models.sql.compiler import SQLCompiler

from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.models import Account


def in_scope(scope: AccessScope, account: str) -> Q:
    """Return the condition for rows of the scope's accounts.

    Named merchants have few accounts, whose ids are read first: the database chooses the index by their statistics.

    Args:
        account: lookup of the row's account, such as `credential__account`; `pk` for an account itself.
    """
    if scope == EVERYWHERE:
        return Q()
    if scope.merchants is None:
        environment = "environment" if account == "pk" else f"{account}__environment"
        return Q(**{f"{environment}__in": scope.environments})
    accounts = Account.objects.filter(merchant__in=scope.merchants, environment__in=scope.environments)
    return Q(**{f"{account}__in": list(accounts.values_list("pk", flat=True))})


def names_in_scope(scope: AccessScope, merchants: str) -> Q:
    """Return the condition for rows whose list of merchants is in the scope; a row without a list names all merchants.

    No index serves it: only for tables without a row for each key or request.

    Args:
        merchants: lookup of the JSON list.
    """
    if scope.merchants is None:
        return Q()
    named = Value(sorted(scope.merchants), output_field=models.JSONField())
    return Q(_IsSubset(F(merchants), named))


class _IsSubset(Func):
    """Whether each element of a JSON list is in another one; false for what is no list."""

    output_field = models.BooleanField()
    conditional = True

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> tuple[str, list[Any]]:
        template = "coalesce(%(expressions)s, false)"
        sql, params = self.as_sql(compiler, connection, template=template, arg_joiner=" <@ ", **options)
        return sql, list(params)

    def as_sqlite(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> tuple[str, tuple[str | int, ...]]:
        (part, part_params), (whole, whole_params) = map(compiler.compile, self.get_source_expressions())
        sql = (
            f"(coalesce(json_type({part}), '') = 'array' AND NOT EXISTS (SELECT 1 FROM json_each({part}) AS element "  # noqa: S608  compiled expressions
            f"WHERE element.value NOT IN (SELECT value FROM json_each({whole}))))"
        )
        return sql, (*part_params, *part_params, *whole_params)
