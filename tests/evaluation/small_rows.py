"""Rows of the seven tasks in the schemas of the hub, of random words."""

import json
import random
from pathlib import Path

WORDS = ["block", "token", "sparse", "neuron", "layer", "gate", "why", "how", "water", "stone", "bird", "fish", "tree"]


def sentence(draw: random.Random, words: int = 8) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, words)))


def rows_of(task: str, count: int, seed: int) -> list[dict]:
    draw = random.Random(f"{task} {seed}")

    def labelled(choices: int) -> dict:
        return {"text": [sentence(draw) for _ in range(choices)], "label": list("ABCDE")[:choices]}

    def row() -> dict:
        if task in ("arc_easy", "arc_challenge"):
            return {"id": "x", "question": sentence(draw), "choices": labelled(4), "answerKey": draw.choice("ABCD")}
        if task == "openbookqa":
            choices = labelled(4)
            return {"id": "x", "question_stem": sentence(draw), "choices": choices, "answerKey": draw.choice("ABCD")}
        if task == "commonsense_qa":
            return {
                "id": "x", "question": sentence(draw), "question_concept": "x", "choices": labelled(5),
                "answerKey": draw.choice("ABCDE"),
            }  # fmt: skip
        if task == "piqa":
            return {"goal": sentence(draw), "sol1": sentence(draw), "sol2": sentence(draw), "label": draw.randint(0, 1)}
        if task == "winogrande":
            text = f"{sentence(draw)} _ {sentence(draw)}"
            return {"sentence": text, "option1": "bird", "option2": "fish", "answer": draw.choice("12")}
        assert task == "hellaswag"
        return {
            "ind": 1, "activity_label": "Stone", "ctx_a": sentence(draw), "ctx_b": sentence(draw), "ctx": "",
            "endings": [sentence(draw) for _ in range(4)], "source_id": "x", "split": "val", "split_type": "indomain",
            "label": draw.choice("0123"),
        }  # fmt: skip

    return [row() for _ in range(count)]


def write_rows(folder: Path, task: str, split: str, count: int = 6, seed: int = 0) -> None:
    (folder / task).mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows_of(task, count, seed))
    (folder / task / f"{split}.jsonl").write_text("".join(lines))
