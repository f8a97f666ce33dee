"""Predictions of `samestep scale --predict` against measurements on limited links between network namespaces.

Compute is emulated by pauses, so that two cores are enough for four ranks. Sizes, links and bucket sizes that are
compared were not used to fit; the predictions are written to results/predicted.json before anything is measured.
Needs root on Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import RESULTS, Rows, keep

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
from network import Network

from samestep.measure.predict import link_from_sweep, model_of
from samestep.measure.scale import Plan, measure, variants
from samestep.measure.verdict import rows_of
from samestep.rundir import step_times_path
from samestep.steptimes import breakdown, read_step_times

HERE = Path(__file__).parent
EMULATED = str(HERE / "scripts" / "emulated.py")
SWEEP = str(HERE.parent / "src" / "samestep" / "measure" / "sweep.py")
CAPS = (None, 0.5, 2.0)
NODES = [f"host{k}" for k in range(4)]


def on_nodes(network: Network, size: int, words: list[str], cap: float | None, home: Path) -> Path:
    """One rank on each of so many nodes; the run's directory."""
    env = {**os.environ, "SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": "14", "OMP_NUM_THREADS": "1"}
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
    started = [
        subprocess.Popen(
            [*network.enter(NODES[k]), sys.executable, "-m", "samestep", "run", "-n", "1", *where, "--node-rank",
             str(k), *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(size)
    ]  # fmt: skip
    said = [one.communicate(timeout=180)[0] for one in started]
    if any(one.returncode for one in started):
        sys.exit("\n".join(said))
    return max(home.iterdir(), key=lambda run: run.stat().st_mtime_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="even,front,back")
    parser.add_argument("--rates", default="100,200")
    parser.add_argument("--sizes", default="2,3,4")
    parser.add_argument("--pause", default="0.001", help="seconds of a layer's forward for each sample")
    parser.add_argument("--times", type=int, default=3, help="runs of each, of which the median counts")
    asked = parser.parse_args()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["SAMESTEP_RUN_DIR"] = str(home / "scale")
        network = Network(home / "hosts", NODES)
        try:
            links = {}
            for rate in asked.rates.split(","):
                for node in NODES:
                    network.limit(node, f"{rate}mbit")
                run = on_nodes(network, 2, [SWEEP], None, home / f"sweep-{rate}")
                sweep = json.loads((run / "logs" / "rank-0.log").read_text().splitlines()[-1])
                links[rate] = link_from_sweep(sweep, 2)
                print(f"link of {rate} Mbit/s: {links[rate]}")
            for shape in asked.shapes.split(","):
                plan = Plan([EMULATED, shape, asked.pause], variants([1, 2], [], 1), 1, 30, False)
                found = rows_of(measure(plan, lambda *_: None), plan.variants)
                for rate, link in links.items():
                    model = model_of(plan, found, link)
                    rows += [
                        {"shape": shape, "mbit": int(rate), "size": int(size), "bucket_mb": cap,
                         "predicted_s": round(model.step_s(int(size), cap)[0], 4),
                         "best_mb": model.predict(int(size)).best_mb}
                        for size in asked.sizes.split(",")
                        for cap in CAPS
                    ]  # fmt: skip
            (RESULTS / "predicted.json").write_text(json.dumps(rows, indent=1) + "\n")
            for row in sorted(rows, key=lambda row: row["mbit"]):
                for node in NODES:
                    network.limit(node, f"{row['mbit']}mbit")
                words = [EMULATED, row["shape"], asked.pause]
                took = []
                for _ in range(asked.times):
                    run = on_nodes(network, row["size"], words, row["bucket_mb"], home / "runs")
                    times = {rank: read_step_times(step_times_path(run, rank)) for rank in range(row["size"])}
                    said = breakdown({rank: one for rank, one in times.items() if one})
                    took.append(median(step.seconds for step in times[0].steps))
                row["measured_s"], row["runs_s"] = round(median(took), 4), [round(one, 4) for one in took]
                row["error"] = round(row["predicted_s"] / row["measured_s"] - 1, 4)
                print(row, said, flush=True)
        finally:
            network.close()
    keep(asked.times, rows)
    errors = sorted(abs(row["error"]) for row in rows)
    print(f"{len(errors)} predictions: median error {median(errors):.1%}, worst {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
