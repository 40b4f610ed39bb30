"""`python -m depthconv`: what this build and machine are, a check against float64, and the table of speeds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from . import bench, build_info

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
PARTS = ["check", "speed", "host"]
EXTRA_PARTS = ["models"]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when the check fails; wrong arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m depthconv", description=__doc__)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; default: check all, time float32")
    parser.add_argument("--shapes", metavar="FILE", help="problems to time, in the form of the package's shapes.json")
    parser.add_argument(
        "--peers",
        choices=["conv2d", "all"],
        default="conv2d",
        help="all: also cuDNN, channels_last and torch.compile of the shifted sum",
    )
    parts = f"repeatable; default: {', '.join(PARTS)}"
    parser.add_argument("--part", action="append", choices=PARTS + EXTRA_PARTS, help=parts)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, fewer checks; on the CPU smaller batches")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - for the standard output")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios as a PNG (needs matplotlib)")
    options = parser.parse_args(arguments)

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        parser.error(f"--device: {error}")
    if kind not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu, cuda or cuda:N, but got {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        missing = "sees no CUDA device" + ("" if torch.version.cuda else ": it is built without CUDA")
        parser.error(f"--device {device}: this torch ({torch.__version__}) {missing}")
    if kind == "cuda" and not build_info()["cuda"]:
        parser.error(f"--device {device}: this build of depthconv has no CUDA kernels ({build_info()['reason']})")
    if options.plot and "speed" not in (options.part or PARTS):
        parser.error("--plot draws the part speed, which --part leaves out")
    try:
        shapes = bench.load_shapes(options.shapes)
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"--shapes: {error}")

    dtypes = [DTYPES[name] for name in options.dtype or ["float32"]]
    checked = dtypes if options.dtype else list(DTYPES.values())
    result = bench.everything(device, dtypes, shapes, options.peers, options.quick, options.part or PARTS, checked)
    print(bench.text(result), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(result, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        bench.plot(result["speed"], options.plot)
    return 0 if all(row["passed"] for row in result.get("check", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
