"""A report as Markdown: the same text and tables, without plots."""

from serving.report.parts import Report, Table

_SPECIAL = "\\`*_{}[]<>#|!~&"


def markdown_text(report: Report) -> str:
    """GitHub-flavoured Markdown in which nothing of the results is read as markup."""
    lines = [f"# {_plain(report.title)}", ""]
    if report.projected:
        lines += ["**Projected:** some tables are scaled from another card, not measured.", ""]
    for place, text in enumerate(report.verdict):
        lines += [f"**{_plain(text)}**" if place == 0 else _plain(text), ""]
    for section in report.sections:
        lines += [f"## {_plain(section.title)}", ""]
        for text in section.text:
            lines += [_plain(text), ""]
        for table in section.tables:
            lines += [*_table(table), ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    rule = ["---:" if place in table.numeric else "---" for place in range(len(table.columns))]
    rows = [table.columns, *table.rows]
    cells = ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]
    return [cells[0], "| " + " | ".join(rule) + " |", *cells[1:]]


def _plain(text: str) -> str:
    folded = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in folded)
