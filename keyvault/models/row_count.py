"""The number of rows of another query, as a column."""

from django.db.models import IntegerField, Subquery


class RowCount(Subquery):
    """The number of rows of a query, which may have a limit. Several counts so need one query."""

    template = "(SELECT COUNT(*) FROM (%(subquery)s) counted)"
    output_field = IntegerField()
    empty_result_set_value = 0
