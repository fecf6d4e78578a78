"""What ``handle.plan()`` and ``handle.report()`` give: the treatment of each parameter, and the figures of each group.

Both are made by a :class:`~commhooks.CommHook`; nothing here communicates.
"""

from commhooks.report.report import Report, ReportRow
from commhooks.report.rows import PlanRow, plan_rows

__all__ = ["PlanRow", "Report", "ReportRow", "plan_rows"]
