"""Why the native module did not load, in words. Imported only when it did not."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path


def explain_load_failure(error: BaseException, folder: Path = Path(__file__).parent) -> str:
    """What is missing or does not fit in `folder`, and what the built files there were built for."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    operators = folder / "_ops.so"
    built = sorted(path.name for path in folder.glob("_C*.so"))
    if not built and not operators.exists():
        text = f"there are no built files in {folder}."
        if (folder.parent / "setup.py").exists():
            text += " These are the sources: build them (pip install --no-build-isolation -e .), or leave their folder."
        return text
    if f"_C{suffix}" not in built:
        there = ", ".join(re.sub(r"_C\.|\.so", "", name) for name in built) or "no Python"
        here = sys.implementation.cache_tag
        return f"it was built for {there}, and this is {here}: install the wheel for this Python."
    if not operators.exists():
        return f"_ops.so is missing beside _C in {folder}: install depthconv again."
    while error.__cause__:  # the loader's own words are innermost
        error = error.__cause__
    return f"{error}; _ops.so {built_as(operators)}. It needs torch >= 2.10 and a C library no older than its own."


def built_as(operators: Path) -> str:
    """What the file says of itself, read from its bytes, since it does not load."""
    found = re.search(rb'\{"version": [^\0]*\}', operators.read_bytes())
    if found is None:
        return "has no readable build record"
    record = json.loads(found[0])
    names = ("version", "torch", "torch_target", "cuda", "architectures", "host_compiler")
    return "was built as " + ", ".join(f"{name} {record.get(name)}" for name in names)
