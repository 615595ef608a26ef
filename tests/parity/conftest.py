"""Collects the parity table and prints it at the end of the run."""

import pytest

_PROPERTY = "parity"


@pytest.fixture
def record_parity(request):
    """Keeps the worst figure of each row and number of replicas, with the test's report."""

    def record(row, report):
        measure = max(report.figures, key=report.figures.get)
        request.node.user_properties.append((_PROPERTY, (row, report.replicas, report.worst, measure)))

    return record


def pytest_terminal_summary(terminalreporter):
    table = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY:
                    row, replicas, worst, measure = value
                    table.setdefault(row, {})[replicas] = (worst, measure)
    if not table:
        return
    terminalreporter.section("parity: worst difference as a part of what is allowed, by replicas")
    for row, figures in sorted(table.items()):
        cells = "  ".join(f"{count}: {worst:.2g} {measure}" for count, (worst, measure) in sorted(figures.items()))
        terminalreporter.write_line(f"{row:34} {cells}")
