"""What a sweep leaves: sweep.csv, sweep.md, sweep.png and sweep.pdf in its folder, always made anew from its runs."""

from sparsellm import locks, regular
from sparsellm.files import write_whole
from sparsellm.sweeps import figure, table
from sparsellm.sweeps.plan import COEFFICIENT, Sweep

NAME = "sweep"


def write_all(sweep: Sweep) -> str:
    """Write the table and the figure, and sum them up for a screen.

    Tasks of a SLURM array do this side by side: one at a time, so that the last one has seen the results of all.
    """
    with regular.to_write(sweep.folder / "lock", "w") as file:
        locks.take(file)
        rows = table.rows(sweep)
        pictures = figure.draw(sweep, rows)
        files = {"csv": table.as_csv(rows).encode()} | (pictures or {})
        markdown = table.as_markdown(sweep, rows)
        image = f"\n![{sweep.name}]({NAME}.png)\n" if pictures else ""
        files["md"] = f"# {sweep.name}\n\n{markdown}{image}".encode()
        for kind, content in files.items():
            write_whole(sweep.folder / f"{NAME}.{kind}", content)
    lines = [markdown, *(str(sweep.folder / f"{NAME}.{kind}") for kind in files)]
    if not pictures:
        lines.append(f"no figure: it needs two finished runs that differ in {COEFFICIENT}")
    return "\n".join(lines)
