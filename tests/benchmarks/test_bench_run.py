"""What bench_run calls a run that a killed rank has not harmed."""

from scripts.benchmarks.bench_run import mistakes


def rows(*steps):
    return [{"step": step} for step in steps]


def test_missing_rows_rows_there_twice_and_exit_codes_are_named():
    assert mistakes(0, rows(1, 2, 3), 3, True) == []
    assert mistakes(0, rows(1, 3), 3, True) == ["rows missing: [2]; rows there twice: []; last row: 3, it should be 3"]
    assert mistakes(0, rows(1, 2, 2, 3), 3, True) == [
        "rows missing: []; rows there twice: [2]; last row: 3, it should be 3"
    ]
    ended, without = mistakes(1, [], 2, False)[:2]
    assert ended == "torchrun ended with exit code 1: it should be 0"
    assert "no rank was killed" in without
    assert mistakes(None, rows(1), 3, True) == ["the time is over: run the same command again to continue the run"]
