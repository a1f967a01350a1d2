"""Holds a test session to a number of passed tests, so that a machine without Slurm cannot pass by skipping."""

from pathlib import Path

import pytest

NO_NAMESPACES = "no network namespaces here: "  # begins the one reason for which a required test may be skipped


class RequiredTests:
    """pytest plugin: of the tests in folder that were selected, none may be skipped and enough must pass.

    A test marked `netns` may be skipped for NO_NAMESPACES, and then counts as passed.  When no test of the folder is
    selected, nothing is checked.
    """

    def __init__(self, folder: Path, num_required: int) -> None:
        self.folder = folder
        self.num_required = num_required
        self.selected: set[str] = set()
        self.passed: set[str] = set()
        self.excused: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not session.config.option.collectonly:
            self.selected = {item.nodeid for item in session.items if self.folder in item.path.parents}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.selected:
            return
        if report.passed and report.when == "call":
            self.passed.add(report.nodeid)
        if report.skipped:
            (self.excused if is_excused(report) else self.skipped).add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.shortfall() is not None and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if (line := self.shortfall()) is not None:
            terminalreporter.write_line(line, red=True)

    def shortfall(self) -> str | None:
        """One line that says what is lacking; None when nothing is."""
        num_enough = len(self.passed) + len(self.excused)
        if not self.selected or (num_enough >= self.num_required and not self.skipped):
            return None
        return (
            f"REQUIRE_SLURM=1: {len(self.passed)} tests in {self.folder.name} passed, {len(self.excused)} found no "
            f"network namespaces and {len(self.skipped)} were skipped; expected at least {self.num_required} passed, "
            "or without namespaces, and none skipped"
        )


def is_excused(report: pytest.TestReport) -> bool:
    """Whether this is a test of network namespaces that found none."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return "netns" in report.keywords and reason.startswith(f"Skipped: {NO_NAMESPACES}")
