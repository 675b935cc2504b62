# SPDX-License-Identifier: Apache-2.0
"""docs/operating/metrics.md tells of every metric of the connector what the code tells Prometheus."""

from pathlib import Path

from kvbm_cxl.vllm_integration.stats import COUNTERS, GAUGES, PREFIX, TIMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating" / "metrics.md"


def test_the_page_has_every_metric():
    rows = [
        f"- `{PREFIX}{name}_total{{{label}}}` ({', '.join(values)}): {text}"
        for name, (label, values, text) in COUNTERS.items()
    ]
    rows += [f"- `{PREFIX}{name}{'{' + ', '.join(labels) + '}' if labels else ''}`: {text}" for name, (labels, text) in GAUGES.items()]
    rows += [f"- `{PREFIX}{name}`: {text}" for name, text in TIMES.items()]
    section = PAGE.read_text().replace("\n  ", " ").partition("## What CxlConnector counts")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("- `")] == rows, "it has to hold\n" + "\n".join(rows)
