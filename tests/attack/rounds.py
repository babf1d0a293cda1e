"""The attacks of tests/attack again and again, each round with the next seed, for so many minutes: `make attack`.

python tests/attack/rounds.py [MINUTES]

Eight rounds flip all eight bits of each byte. In the end there is a line for each kind of attack, and for each test
that failed the command that repeats it; the exit code is 1 if one failed. At least one round is done.
"""

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter

LINE = re.compile(r"(.+): tried (\d+), held (\d+), failed (\d+)")
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-n",
    "auto",
    "--maxprocesses",
    "4",
    "--dist",
    "loadfile",
    "tests/attack",
    "-rPfE",
]


def main(minutes: float) -> int:
    begin, seed, longest = time.monotonic(), random.randrange(10**6), 0.0
    tried, held, failed, repeats = Counter(), Counter(), Counter(), []
    while longest == 0 or time.monotonic() + longest < begin + 60 * minutes:
        start = time.monotonic()
        environment = os.environ | {"ATTACK_SEED": str(seed)}
        done = subprocess.run(PYTEST, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in done.stdout.splitlines():
            if found := LINE.match(line):
                for counter, number in zip((tried, held, failed), found.groups()[1:], strict=True):
                    counter[found[1]] += int(number)
            elif found := re.match(r"(?:FAILED|ERROR) (\S+)", line):
                repeats.append(f"ATTACK_SEED={seed} python -m pytest '{found[1]}'")
        if done.returncode:
            print(done.stdout.partition(" PASSES ")[0])
            repeats = repeats or [f"ATTACK_SEED={seed} python -m pytest tests/attack"]
        longest = max(longest, time.monotonic() - start)
        print(f"seed {seed}: {done.stdout.splitlines()[-1]}", flush=True)
        seed += 1
    for kind in sorted(tried):
        print(f"{kind}: tried {tried[kind]:,}, held {held[kind]:,}, failed {failed[kind]:,}")
    for repeat in repeats:
        print(f"failed: {repeat}")
    return 1 if repeats else 0


if __name__ == "__main__":
    sys.exit(main(float(*sys.argv[1:] or ["30"])))
