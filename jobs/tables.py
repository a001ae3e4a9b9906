"""Tables on standard output."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NO_FIGURE = "-"
PLAIN_WIDTH = 120  # of tables that go to a file or a pipe


def print_table(title: str, columns: list[str], rows: list[list[str]], *, num_left: int = 1) -> None:
    """A table on standard output; figures to the right, behind `num_left` columns of words."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # cells are plain text, whatever brackets they have
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)


def decimals(value: float | None) -> str:
    """A cell with two decimals; a dash where there is no such figure."""
    return NO_FIGURE if value is None else f"{value:.2f}"
