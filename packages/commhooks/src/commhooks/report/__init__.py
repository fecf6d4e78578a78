"""Results of `handle.plan()` and `handle.report()`, and planned bytes of nodes (:func:`node_bytes`).

A :class:`~commhooks.CommHook` makes both. Nothing here communicates.
"""

from commhooks.report.plan_table import NodeBytes, PlanRow, node_bytes, plan_rows
from commhooks.report.report import Report, ReportRow
from commhooks.report.text import as_text

__all__ = ["NodeBytes", "PlanRow", "Report", "ReportRow", "as_text", "node_bytes", "plan_rows"]
