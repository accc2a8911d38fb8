"""``python -m tests.gpu``: check one GPU in five minutes, or device placement on a fake accelerator without one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.gpu.kit import checks_of, run_checks, table, write

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="", help="the device to check; by default the first GPU")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results are written")
    asked = parser.parse_args()
    if not asked.device and not torch.cuda.is_available():
        return without_gpu()
    device = torch.device(asked.device or "cuda:0")
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU, to try the checks"
    small = {} if is_gpu else {"seconds": 3.0, "batch": 2, "sequence": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    print(f"Checking {name} with torch {torch.__version__}.", flush=True)
    results = run_checks(checks_of(str(device), **small), say=lambda text: print(text, flush=True))
    print(table(results, name))
    write(asked.json, results, name)
    print(f"Written to {asked.json}.")
    return int(any(result.outcome != "passed" for result in results))


def without_gpu() -> int:
    """Lists the skipped checks and runs those on the fake accelerator."""
    import pytest

    names = [check.name for check in checks_of("cuda:0")]
    print(f"No GPU: torch.cuda.is_available() is False. Skipping {len(names)} checks:")
    print("".join(f"  {name}\n" for name in names))
    print("Checking device placement on a fake accelerator instead.", flush=True)
    return int(pytest.main(["-q", str(HERE / "test_fake_device.py")]))


if __name__ == "__main__":
    sys.exit(main())
