"""Tables on standard output."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NO_FIGURE = "-"
PLAIN_WIDTH = 120  # width of tables in a file or pipe


def print_table(title: str, columns: list[str], rows: list[list[str]], *, num_left: int = 1) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # brackets in cells are not markup
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)


def decimals(value: float | None) -> str:
    return NO_FIGURE if value is None else f"{value:.2f}"
