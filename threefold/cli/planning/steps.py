"""The parts of work that takes seconds to minutes, as a bar."""


class Steps:
    """A bar on standard error, which is gone at the end; none where that is no terminal.

    Args:
        doing: what is done with each part, such as `Measuring`.
        shown: whether there is a bar.
    """

    def __init__(self, doing: str, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
        # Without a thread of its own, beside which no process should be forked.
        console = Console(stderr=True)
        self._bars = Progress(
            *columns,
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task("")
        self._doing = doing

    def __enter__(self) -> "Steps":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def tell(self, part: str, number: int, parts: int) -> None:
        """A part begins, or so much of it is done."""
        self._bars.update(self._task, description=f"{self._doing} {part}", completed=number, total=parts, refresh=True)
