"""What a sweep leaves: sweep.csv, sweep.md, sweep.png and sweep.pdf in its folder, always made anew from its runs."""

from contextlib import suppress

from sparsellm.figures import drawn
from sparsellm.sweep import figure, table
from sparsellm.sweep.plan import COEFFICIENT, Sweep
from sparsellm.system import locks, regular
from sparsellm.system.files import write_whole

NAME = "sweep"


def write_all(sweep: Sweep) -> tuple[str, str | None]:
    """Write the table and the figure, and sum them up for a screen; also why they cannot be written, or None.

    Tasks of a SLURM array do this side by side: one at a time, so that the last one has seen the results of all.
    """
    markdown = ""
    try:
        with regular.to_write(sweep.folder / "lock", "w") as file:
            locks.take(file)
            rows = table.rows(sweep)
            markdown = table.as_markdown(sweep, rows)
            write_whole(sweep.folder / f"{NAME}.csv", table.as_csv(rows).encode())
            pictures = drawn({NAME: lambda: figure.draw(sweep, rows)}).get(NAME)
            image = f"\n![{sweep.name}]({NAME}.png)\n" if pictures else ""
            files = {"md": f"# {sweep.name}\n\n{markdown}{image}".encode()} | (pictures or {})
            for kind, content in files.items():
                write_whole(sweep.folder / f"{NAME}.{kind}", content)
    except Exception as error:  # of a full disk, or of what an evaluation has left: the runs go on
        with suppress(Exception):
            markdown = markdown or table.as_markdown(sweep, table.rows(sweep))
        return markdown, (
            f"the table in {sweep.folder} cannot be written ({type(error).__name__}: {error}): the runs and their"
            " scores are in their own folders, and the same command writes the table"
        )
    lines = [markdown, *(str(sweep.folder / f"{NAME}.{kind}") for kind in ("csv", *files))]
    if not pictures:
        lines.append(f"no figure: it needs two finished runs that differ in {COEFFICIENT}")
    return "\n".join(lines), None
