"""Print the README's cost tables, made from committed result files.

python hub_kernels/cost_table.py            `hf-batchinv bench`: bfloat16, and linear in float32, beside stock
python hub_kernels/cost_table.py --all      every dtype and every peer
python hub_kernels/cost_table.py --models   `examples/throughput.py`: whole models
"""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from hf_batchinv.bench.cases import OPS  # noqa: E402
from hf_batchinv.bench.summary import NOSPLIT, lines  # noqa: E402

MACHINE = ("device", "driver", "torch", "triton")
MODELS = HERE.parent / "examples" / "results"


def machine_of(results: list[dict], names: tuple[str, ...] = MACHINE) -> dict:
    """The environment that all results share, with "days" on which they were measured."""
    machines = [{name: result["env"][name] for name in names} for result in results]
    assert all(machine == machines[0] for machine in machines), "all files must come from one kind of machine"
    days = sorted({result["env"]["date"] for result in results})
    return machines[0] | {"days": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"}


def load_results() -> tuple[dict, list[dict]]:
    """(machine, rows) of all result files of the kernel packages, rows in the order of the ops."""
    results = [json.loads(path.read_text()) for path in sorted(HERE.glob("*/benchmarks/results/*.json"))]
    rows = [row for result in results for row in result["rows"]]
    return machine_of(results), sorted(rows, key=lambda row: OPS.index(row["op"]))


def _shown(line) -> bool:
    """What the README shows: what runs by default, beside what a stock model calls."""
    return line.peer != NOSPLIT and (line.dtype == "bfloat16" or (line.dtype, line.op) == ("float32", "linear"))


def cost_table(everything: bool = False) -> str:
    """The table in Markdown: our speed as a share of stock's, geometric mean and range over the cases of a line."""
    machine, rows = load_results()
    software = f"torch {machine['torch']}, Triton {machine['triton']}, driver {machine['driver']}"
    text = [
        f"{machine['device']}, {'' if everything else 'bfloat16, '}{software}, {machine['days']}:",
        "",
        "| op | stock | speed, stock = 1 | worst ... best case | cases | target |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines(rows):
        if not everything and not _shown(line):
            continue
        assert not line.broken, f"bits differ in {line}: no speed is stated"
        name = f"{line.op}, {line.group}" + (f", {line.dtype}" if everything or line.dtype == "float32" else "")
        target = "" if line.target is None else f"{line.target:.2f}"
        spread = f"{line.worst:.2f} ... {line.best:.2f}"
        text.append(f"| {name} | {line.peer} | {line.mean:.2f} | {spread} | {line.cases} | {target} |")
    return "\n".join(text)


def model_table() -> str:
    """The table of whole models in Markdown: stock's time over ours, geometric mean and range, and the most memory."""
    files = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    files = [file for file in files if "profiles" in file]
    machine = machine_of(files, (*MACHINE, "transformers"))
    software = f"torch {machine['torch']}, Triton {machine['triton']}, transformers {machine['transformers']}"
    groups: dict[tuple, list[dict]] = {}
    for file in files:
        for row in file["rows"]:
            assert row["bits_ok"], f"bits differ in {row}: no speed is stated"
            cache = f", {row['cache']} cache" if row["op"] == "generate" else ""
            groups.setdefault((row["model"], row["op"] + cache, file["dtype"]), []).append(row)
    text = [
        f"{machine['device']}, {software}, driver {machine['driver']}, {machine['days']}:",
        "",
        "| model | work | batch x tokens | speed, stock = 1 | worst ... best case | memory, stock = 1 |",
        "|---|---|---|---|---|---|",
    ]
    for (model, work, dtype), rows in groups.items():
        ratios = [row["ratio"] for row in rows]
        memory = max(row["ours_peak_bytes"] / row["stock_peak_bytes"] for row in rows)
        by_size = sorted((row["prompt"], row["batch"]) for row in rows)
        sizes = ", ".join(f"{batch} x {prompt}" for prompt, batch in by_size)
        speed = f"{statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} ... {max(ratios):.2f}"
        text.append(f"| {model}, {dtype} | {work} | {sizes} | {speed} | {memory:.2f} |")
    return "\n".join(text)


if __name__ == "__main__":
    print(model_table() if sys.argv[1:] == ["--models"] else cost_table(everything=sys.argv[1:] == ["--all"]))
