"""Pictures of docs/ show the rows of the files that docs/results/README.md names."""

import re

from PIL import Image
from results.documents import FOLDER, ROOT, file, runs_of, tables

from scripts.compare_runs import checksum


def test_a_picture_shows_the_rows_of_its_file():
    pictures = {
        re.match(r"\[([\w.]+)\]", cell)[1]: rest for cell, *rest in tables(FOLDER / "README.md")["README.md#figures"]
    }
    assert pictures.keys() == {path.name for path in (ROOT / "docs").glob("*.png")}
    for picture, (cell, left_out) in pictures.items():
        names = re.findall(r"\]\(([\w.]+)\)", cell)
        assert names, f"{picture} has no file"
        if picture != "gains.png":  # test_readme.py has its test
            if names[0].endswith(".jsonl"):
                out = left_out.split(", ")
                shown = {name: run["rows"] for name, run in runs_of(names[0]).items() if name not in out}
            else:
                shown = {name: file(name)["results"] for name in names}
            with Image.open(ROOT / "docs" / picture) as image:
                assert image.info["Source"] == checksum(shown), f"{picture} has other rows than {names[0]}"
