"""Holds a test session to a number of passed tests, so that a machine without Slurm cannot pass by skipping."""

from pathlib import Path

import pytest


class RequiredTests:
    """pytest plugin: of the tests in folder that were selected, none may be skipped and enough must pass.

    A test marked `netns` may be skipped.  When no test of the folder is selected, nothing is checked.
    """

    def __init__(self, folder: Path, num_required: int) -> None:
        self.folder = folder
        self.num_required = num_required
        self.selected: set[str] = set()
        self.passed: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not session.config.option.collectonly:
            self.selected = {item.nodeid for item in session.items if self.folder in item.path.parents}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.selected:
            return
        if report.passed and report.when == "call":
            self.passed.add(report.nodeid)
        if report.skipped and "netns" not in report.keywords:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.shortfall() is not None and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if (line := self.shortfall()) is not None:
            terminalreporter.write_line(line, red=True)

    def shortfall(self) -> str | None:
        """One line that says what is lacking; None when nothing is."""
        if not self.selected or (len(self.passed) >= self.num_required and not self.skipped):
            return None
        return (
            f"REQUIRE_SLURM=1: {len(self.passed)} tests in {self.folder.name} passed and {len(self.skipped)} were "
            f"skipped; expected at least {self.num_required} passed and none skipped"
        )
