"""`baton top` on a terminal: tables that are refreshed until the user quits."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from baton.cli.top.snapshot import Snapshot, SnapshotReader
from baton.cli.top.tables import (
    REQUEST_COLUMNS,
    WORKER_COLUMNS,
    headline,
    request_rows,
    worker_rows,
)
from baton.errors import BatonError
from baton.rpc.tls import Tls


class Top(App[None]):
    """Terminal application that shows what `reader` sees. The caller closes `reader`."""

    TITLE = "baton top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: auto; padding: 0 1; }
    #workers { height: auto; max-height: 60%; margin-bottom: 1; }
    #requests { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
    ]

    def __init__(self, reader: SnapshotReader, interval: float) -> None:
        super().__init__()
        self._reader = reader
        self._interval = interval
        self._is_paused = False
        self._is_reading = False

    def compose(self) -> ComposeResult:
        yield Static("looking ...", id="headline")
        yield DataTable(id="workers", show_cursor=False, zebra_stripes=True)
        yield DataTable(id="requests", show_cursor=False, zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        self._table("workers").add_columns(*WORKER_COLUMNS)
        self._table("requests").add_columns(*REQUEST_COLUMNS)
        self.set_interval(self._interval, self.read)
        await self.read()

    def action_pause(self) -> None:
        """Pauses the display, or resumes it."""
        self._is_paused = not self._is_paused
        self.query_one("#headline", Static).styles.opacity = 0.5 if self._is_paused else 1.0

    async def read(self) -> None:
        """Refreshes the display. If the router does not answer, shows the error; the tables stay
        until it answers again."""
        if self._is_paused or self._is_reading:
            return
        self._is_reading = True
        try:
            result: Snapshot | BatonError = await self._reader.read()
        except BatonError as error:
            result = error
        finally:
            self._is_reading = False
        if not self.query("#headline"):
            return  # the user has quit meanwhile
        if isinstance(result, BatonError):
            self._say(Text.assemble((self._reader.address, "bold"), ("  " + str(result), "red")))
        else:
            self.show(result)

    def show(self, snapshot: Snapshot) -> None:
        """Draws a snapshot."""
        self._say(headline(snapshot, self._reader.address))
        self._fill("workers", worker_rows(snapshot))
        self._fill("requests", request_rows(snapshot))

    def _say(self, line: Text) -> None:
        self.query_one("#headline", Static).update(line)

    def _fill(self, name: str, rows: Sequence[Sequence[Text]]) -> None:
        table = self._table(name)
        place = table.scroll_offset
        table.clear()
        for row in rows:
            table.add_row(*row)
        table.scroll_to(place.x, place.y, animate=False)

    def _table(self, name: str) -> "DataTable[Text]":
        return self.query_one(f"#{name}", DataTable)


async def run_app(address: str, token: str, interval: float, tls: Tls | None = None) -> None:
    """Shows the cluster until the user quits."""
    async with SnapshotReader(address, token, tls) as reader:
        await Top(reader, interval).run_async()
