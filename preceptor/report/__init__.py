"""`preceptor report`: a run folder as one HTML page that needs nothing else, no network either."""

from preceptor.report.page import write_report
from preceptor.report.run import ReportError

__all__ = ["ReportError", "write_report"]
