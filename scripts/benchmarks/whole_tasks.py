"""The seven tasks at their full size on the hub, made from a few local rows.

Rows are repeated, and each repetition starts with a unique name, because equal sequences of tokens would be computed
once. The numbers of rows are the hub's; there are 68,671 requests, one per choice of each row.
"""

import json
from itertools import count, product
from pathlib import Path

from sparsellm.evaluation.tasks import TASKS, local_rows

ROWS = {
    "arc_easy": 2_376, "arc_challenge": 1_172, "hellaswag": 10_042, "openbookqa": 500, "piqa": 1_838,
    "winogrande": 1_267, "commonsense_qa": 1_221,
}  # fmt: skip
FIELDS = {  # the field at the start of a request
    "arc_easy": "question", "arc_challenge": "question", "hellaswag": "activity_label", "openbookqa": "question_stem",
    "piqa": "goal", "winogrande": "sentence", "commonsense_qa": "question",
}  # fmt: skip
NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")


def write(data_dir: str, folder: Path) -> None:
    """Write FOLDER/TASK/SPLIT.jsonl, `ROWS` of each task, from the rows of `data_dir`, which are .jsonl."""
    names = (" and ".join(names) for length in count(1) for names in product(NAMES, repeat=length))
    names = [next(names) for _ in range(100)]
    for task, number in ROWS.items():
        rows = [json.loads(line) for line in local_rows(task, data_dir).read_text(encoding="utf-8").splitlines()]
        (folder / task).mkdir(parents=True)
        with (folder / task / f"{TASKS[task].split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(number):
                row, field = rows[i % len(rows)], FIELDS[task]
                named = row if i < len(rows) else row | {field: f"{names[i // len(rows)]}: {row[field]}"}
                file.write(json.dumps(named) + "\n")
