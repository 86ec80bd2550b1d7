"""Print the README's cost table, made from the committed result files of the speed scripts.

python hub_kernels/cost_table.py
"""

import json
import math
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINEAR = HERE / "batch-invariant-linear" / "benchmarks" / "results" / "h200.json"
ATTENTION = HERE / "batch-invariant-flash-attn" / "benchmarks" / "results" / "h200.json"
# (most rows, name)
ROWS = ((16, "1 to 16 rows"), (64, "32 and 64 rows"), (400, "96 to 400 rows"), (math.inf, "512 to 8192 rows"))


def cost_table() -> str:
    """The table in Markdown: our speed as a share of stock's, geometric mean and range over the cases of a line."""
    linear, attention = json.loads(LINEAR.read_text()), json.loads(ATTENTION.read_text())
    ratios = defaultdict(list)
    for row in linear["rows"]:
        name = next(name for most, name in ROWS if row["M"] <= most)
        ratios[f"linear, {name}", "`F.linear` (cuBLAS)"].append(row["ratio"])
    for row in attention["rows"]:
        ratios[f"attention, {row['case']}", "faster of SDPA's cuDNN and flash"].append(row["ratio"])
    env = linear["env"]
    assert env == attention["env"], "both files must come from one machine and day"
    software = f"torch {env['torch']}, Triton {env['triton']}, driver {env['driver']}"
    lines = [
        f"{env['device']}, bfloat16, {software}, {env['date']}:",
        "",
        "| op | stock | speed, stock = 1 | worst ... best case | cases |",
        "|---|---|---|---|---|",
    ]
    for (op, stock), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        lines.append(f"| {op} | {stock} | {mean:.2f} | {min(values):.2f} ... {max(values):.2f} | {len(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(cost_table())
