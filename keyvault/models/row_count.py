"""The number of rows of another query, or the sum of their numbers, as a column."""

from django.db.models import IntegerField, Subquery


class RowCount(Subquery):
    """The number of rows of a query, which may have a limit. Several counts so need one query."""

    template = "(SELECT COUNT(*) FROM (%(subquery)s) counted)"
    output_field = IntegerField()
    empty_result_set_value = 0


class RowSum(Subquery):
    """The sum of the column `number` of the rows of a query, which may have a limit."""

    template = "(SELECT COALESCE(SUM(counted.number), 0) FROM (%(subquery)s) counted)"
    output_field = IntegerField()
    empty_result_set_value = 0
