"""Pictures and the self-contained HTML report of one profile and one plan.

matplotlib comes with the ``report`` extra and is imported only when a report is written.
"""

from hybridindex.report.rows import LoadRow
from hybridindex.report.write import ReportFiles, write_report

__all__ = ["LoadRow", "ReportFiles", "write_report"]
