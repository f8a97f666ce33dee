"""The benchmarks that read the product's own objects still run; what they measure is kept in benchmarks/results."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("benchmark", ["exact --rounds 1", "meter --rounds 1", "same --rounds 1", "watch"])
def test_a_benchmark_runs(benchmark: str, tmp_path: Path) -> None:
    name, *options = benchmark.split()
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    command = [sys.executable, f"benchmarks/{name}.py", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    # its exit code may be that of a limit, which a busy machine exceeds
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("\n") > 0
