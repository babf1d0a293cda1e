"""Writes sweep.csv, .json, .md, .png and .pdf in the sweep's folder, always from the runs' files.

sweep.json contains the rows of sweep.csv, and the command, machine, commit and versions with which it was written.
"""

import json
from contextlib import suppress

from sparsellm.analysis.report import as_csv
from sparsellm.figures import drawn
from sparsellm.sweep import figure, table
from sparsellm.sweep.plan import COEFFICIENT, Sweep
from sparsellm.system import locks, regular
from sparsellm.system.files import write_whole
from sparsellm.system.provenance import provenance

NAME = "sweep"


def write_all(sweep: Sweep) -> tuple[str, str | None]:
    """Write the table and the figure. Returns a summary for the screen, and an error message if writing failed.

    Tasks of a SLURM array call this concurrently and take turns, so that the last one sees all results.
    """
    shown = ""
    try:
        with regular.to_write(sweep.folder / "lock", "w") as file:
            locks.take(file)
            rows = table.rows(sweep)
            shown, markdown = table.as_text(sweep, rows), table.as_markdown(sweep, rows)
            write_whole(sweep.folder / f"{NAME}.csv", as_csv(rows))
            plots = drawn({NAME: lambda: figure.draw(sweep, rows)}).get(NAME)
            image = f"\n![{sweep.name}]({NAME}.png)\n" if plots else ""
            files = {"json": (json.dumps(provenance() | {"rows": rows}, indent=1) + "\n").encode()}
            files |= {"md": f"# {sweep.name}\n\n{markdown}{image}".encode()} | (plots or {})
            for kind, content in files.items():
                write_whole(sweep.folder / f"{NAME}.{kind}", content)
    except Exception as error:  # a full disk, or damaged results of an evaluation: the sweep continues
        with suppress(Exception):
            shown = shown or table.as_text(sweep, table.rows(sweep))
        return shown, (
            f"the table in {sweep.folder} cannot be written ({type(error).__name__}: {error}): the runs and their"
            " scores are in their own folders; run the same command to write the table"
        )
    lines = [shown, "", *(str(sweep.folder / f"{NAME}.{kind}") for kind in ("csv", *files))]
    if not plots:
        lines.append(f"no figure: it needs at least two finished runs with different {COEFFICIENT}")
    return "\n".join(lines), None
