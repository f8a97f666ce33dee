"""Predictions of `samestep scale --predict` against measurements on limited links between network namespaces.

Compute is emulated by pauses, so that two cores are enough for four ranks. The model was not fitted to the sizes, links
and bucket sizes that are compared here; predictions are written to results/predicted.json before the measurements.
Needs root on Linux. Writes the table and the plot of docs/prediction.md.
"""

import argparse
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import RESULTS, Rows, keep

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
from network import Network

from samestep.measure.predict import SWEEP, link_from_sweep, model_of
from samestep.measure.scale import Plan, measure, variants
from samestep.measure.verdict import rows_of
from samestep.rundir import step_times_path
from samestep.steptimes import read_step_times

HERE = Path(__file__).parent
EMULATED = str(HERE / "scripts" / "emulated.py")
PAGE = HERE.parent / "docs" / "prediction.md"
CAPS = (None, 0.25, 0.5, 2.0)
NODES = [f"host{k}" for k in range(4)]
# The gradients' sizes by layer, Mbit/s of each link, and how many ranks.
CASES = (("even", 200, 2), ("front", 200, 3), ("even", 200, 4), ("back", 100, 2), ("even", 100, 3))
STEPS = 11


def on_nodes(network: Network, size: int, words: list[str], cap: float | None, home: Path) -> Path:
    """One rank on each of so many nodes; the run's directory."""
    env = {**os.environ, "SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": str(STEPS), "OMP_NUM_THREADS": "1"}
    if cap is not None:
        env["SAMESTEP_DDP"] = json.dumps({"bucket_cap_mb": cap})
    where = [
        "--nodes",
        str(size),
        "--rendezvous",
        f"tcp://{network.address[NODES[0]]}:29517",
        "--run-dir",
        str(home),
    ]
    run = [sys.executable, "-m", "samestep", "run", "-n", "1", *where, "--node-rank"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([*network.enter(NODES[k]), *run, str(k), *words], env=env, **pipes)
        for k in range(size)
    ]
    said = [process.communicate(timeout=180)[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("\n".join(said))
    return max(home.iterdir(), key=lambda run: run.stat().st_mtime_ns)


def predicted(network: Network, home: Path, pause: str) -> Rows:
    """A prediction for each case and bucket size: of links measured between two nodes, scripts at 1 and 2 ranks."""
    links, rows = {}, []
    for rate in sorted({rate for _, rate, _ in CASES}):
        limit(network, rate)
        run = on_nodes(network, 2, [str(SWEEP)], None, home / f"sweep-{rate}")
        _, sweep = json.loads((run / "logs" / "rank-0.log").read_text().splitlines()[-1])
        links[rate] = link_from_sweep(sweep, 2)
        print(f"link of {rate} Mbit/s: {links[rate]}", flush=True)
    for shape in sorted({shape for shape, _, _ in CASES}):
        plan = Plan([EMULATED, shape, pause], variants([1, 2], [], 1), 1, 24, False)
        found = rows_of(measure(plan, lambda *_: None)[0], plan.variants)
        for _, rate, size in (case for case in CASES if case[0] == shape):
            step_s = model_of(plan, found, links[rate]).step_s
            rows += [
                {"shape": shape, "mbit": rate, "size": size, "bucket_mb": cap,
                 "predicted_s": round(step_s(size, cap)[0], 4)}
                for cap in CAPS
            ]  # fmt: skip
    return rows


def limit(network: Network, rate: int) -> None:
    for node in NODES:
        network.limit(node, f"{rate}mbit")


def choices(rows: Rows) -> list[tuple[float | None, float]]:
    """For each case the bucket size that the model chooses, and how much slower it is than the best one measured."""
    found = []
    for case in dict.fromkeys((row["shape"], row["mbit"], row["size"]) for row in rows):
        own = [row for row in rows if (row["shape"], row["mbit"], row["size"]) == case]
        # as `scale` chooses: of equal ones the smallest, which is sent earliest
        chosen = min(own, key=lambda row: (row["predicted_s"], row["bucket_mb"] or math.inf))
        best = min(row["measured_s"] for row in own)
        found.append((chosen["bucket_mb"], chosen["measured_s"] / best - 1))
    return found


def table(rows: Rows) -> list[str]:
    """What docs/prediction.md shows."""
    lines = [
        "| model | link, Mbit/s | ranks | bucket_cap_mb | predicted, ms | measured, ms | error |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        cap = row["bucket_mb"] or "DDP's own"
        times = (
            f"{1e3 * row['predicted_s']:.0f} | {1e3 * row['measured_s']:.0f} | {100 * row['error']:+.1f} %"
        )
        lines.append(f"| {row['shape']} | {row['mbit']} | {row['size']} | {cap} | {times} |")
    errors = sorted(abs(row["error"]) for row in rows)
    slower = [f"{100 * more:.1f} %" for _, more in choices(rows)]
    middle, worst = 100 * median(errors), 100 * errors[-1]
    said = f"Of {len(rows)} predictions the median error is {middle:.1f} %, the worst {worst:.1f} %."
    return [*lines, "", said, "The bucket size that the model chooses is slower than the best one measured by "
            f"{', '.join(slower)} in the {len(slower)} cases."]  # fmt: skip


def write(rows: Rows) -> None:
    """The table between the page's marks, and the plot."""
    mark = re.compile(r"(<!-- predicted -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(
        mark.sub(lambda found: found[1] + "\n".join([*table(rows), ""]) + found[2], PAGE.read_text())
    )
    runpy.run_path(str(PAGE.parent / "pictures" / "draw.py"), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", default="0.001", help="seconds of a layer's forward for each sample")
    parser.add_argument("--times", type=int, default=1, help="runs of each, of which the fastest counts")
    parser.add_argument("--page", action="store_true", help="write the page again from the last results")
    asked = parser.parse_args()
    if asked.page:
        write(json.loads((RESULTS / "predict.json").read_text())["rows"])
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["SAMESTEP_RUN_DIR"] = str(home / "scale")
        network = Network(home / "hosts", NODES)
        try:
            rows = predicted(network, home, asked.pause)
            (RESULTS / "predicted.json").write_text(json.dumps(rows, indent=1) + "\n")
            for row in rows:
                limit(network, row["mbit"])
                took = []
                for _ in range(asked.times):
                    words = [EMULATED, row["shape"], asked.pause]
                    run = on_nodes(network, row["size"], words, row["bucket_mb"], home / "runs")
                    times = read_step_times(step_times_path(run, 0))
                    took.append(median(step.seconds for step in times.steps))
                row["measured_s"], row["runs_s"] = (
                    round(min(took), 4),
                    [round(seconds, 4) for seconds in took],
                )
                row["error"] = round(row["predicted_s"] / row["measured_s"] - 1, 4)
                print(row, flush=True)
        finally:
            network.close()
    keep(asked.times, rows)
    write(rows)
    print("\n".join(table(rows)[-2:]))


if __name__ == "__main__":
    main()
