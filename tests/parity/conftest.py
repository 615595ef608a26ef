"""Collects the parity table and prints it at the end of the run."""

import pytest

_TABLE = pytest.StashKey()


@pytest.fixture
def record_parity(request):
    """Keeps the worst figure of each row and number of replicas."""
    table = request.config.stash.setdefault(_TABLE, {})

    def record(row, report):
        measure = max(report.figures, key=report.figures.get)
        table.setdefault(row, {})[report.replicas] = (report.worst, measure)

    return record


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash.get(_TABLE, {})
    if not table:
        return
    terminalreporter.section("parity: worst difference as a part of what is allowed, by replicas")
    for row, figures in table.items():
        cells = "  ".join(f"{count}: {worst:.2g} {measure}" for count, (worst, measure) in sorted(figures.items()))
        terminalreporter.write_line(f"{row:34} {cells}")
