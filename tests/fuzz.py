"""Random problems against float64 for as long as asked: python tests/fuzz.py --device cuda --count 100000 --seed 1

Prints how many passed and the first ten failures as the dict that --case repeats; exit code 1 on a failure.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import time

from problems import Problem, as_dict, check, random_problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--count", type=int, default=1000, help="how many problems")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--case", type=ast.literal_eval, help="check this one problem, a dict as a failure prints it")
    options = parser.parse_args()
    if options.case:
        check(Problem(**options.case), options.device)
        print("passed")
        return 0
    rng = random.Random(options.seed)
    passed = failed = 0
    began = told = time.monotonic()
    for index in range(options.count):
        problem = random_problem(rng.randint, rng.choice)
        try:
            check(problem, options.device)
            passed += 1
        except Exception as error:
            failed += 1
            if failed <= 10:
                print(f'problem {index}: {type(error).__name__}: {error}\n--case "{as_dict(problem)}"', flush=True)
            if not isinstance(error, AssertionError):  # the device may be unusable from here on
                break
        now = time.monotonic()
        if now - told > 10:
            told = now
            print(f"{passed} passed, {failed} failed in {now - began:.0f} s", flush=True)
        if now - began > options.seconds:
            break
    took = time.monotonic() - began
    print(f"{options.device}, seed {options.seed}: {passed} passed, {failed} failed in {took:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
