"""Results of `handle.plan()` and `handle.report()`: the treatment of each parameter, and the figures of each group.

A :class:`~commhooks.CommHook` makes both. Nothing here communicates.
"""

from commhooks.report.plan import PlanRow, plan_rows, plan_shapes
from commhooks.report.report import Report, ReportRow
from commhooks.report.text import as_text

__all__ = ["PlanRow", "Report", "ReportRow", "as_text", "plan_rows", "plan_shapes"]
