"""The notebooks run from a clean kernel, and what is committed of them has their outputs.

To run them again and write the new outputs in place:

    python -m tests.test_notebooks
"""

import base64
import os
import sys
from pathlib import Path

import pytest
from torch import nn

import hf_batchinv
from hf_batchinv.smollm2 import find_smollm2
from tests.tiny_models import make

nbformat = pytest.importorskip("nbformat", reason="notebooks are read with nbformat")
nbclient = pytest.importorskip("nbclient", reason="notebooks are run with nbclient and ipykernel")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = ("why_batch_size_changes_bits.ipynb", "reproducible_eval.ipynb")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
IMAGES = {"why_batch_size_changes_bits.ipynb": 1, "reproducible_eval.ipynb": 2}


def read(name):
    return nbformat.read(EXAMPLES / name, as_version=4)


def execute(name):
    """The notebook with fresh outputs. An exception in a cell is raised here."""
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])  # works in a bare checkout, too
    # One thread, whatever pytest's own environment asks for, before torch is imported.
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, which nothing here needs
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(EXAMPLES)}},
    )
    client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(METADATA)  # no version of the Python that ran it
    return notebook


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook):
    return "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")


def images(notebook):
    encoded = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [base64.b64decode(image) for image in encoded]


def check(notebook, name):
    """What must hold on every machine. That a converted model's bits are the same, the notebooks assert themselves."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert len(images(notebook)) == IMAGES[name]
    assert all(image.startswith(b"\x89PNG") and len(image) > 10_000 for image in images(notebook))
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run it in one go, from a clean kernel"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_from_a_clean_kernel(name):
    find_smollm2()  # where it is not cached, fetching it is not to count as a cell's time
    notebook = execute(name)
    check(notebook, name)
    if name == "why_batch_size_changes_bits.ipynb":
        assert "Same bits on every axis that applies." in printed(notebook)
    else:
        assert "converted: 192 scores, the same bits at batch sizes (1, 8, 16, 32)" in printed(notebook)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_outputs_are_there_and_clean(name):
    notebook = read(name)
    nbformat.validate(notebook)
    check(notebook, name)
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert notebook.metadata == METADATA
    assert not [cell.id for cell in notebook.cells if cell.metadata], "no timing, no editor state"
    assert (EXAMPLES / name).stat().st_size < 400_000


def test_committed_outputs_show_stock_differing_and_converted_the_same():
    why, evaluation = (printed(read(name)) for name in NOTEBOOKS)
    assert "Results depend on: " in why and "first differs model.layers.0." in why
    assert "Same bits on every axis that applies." in why
    rows = [line.split() for line in evaluation.splitlines() if line.startswith(("stock  ", "converted  "))]
    other = {arm: [int(row[3]) for row in rows if row[0] == arm] for arm in ("stock", "converted")}
    assert len(other["stock"]) == len(other["converted"]) == 4
    assert max(other["stock"]) > 0
    assert max(other["converted"]) == 0


@pytest.mark.parametrize("kind", ["verify", "audit"])
def test_a_report_is_text_in_a_notebook(kind, monkeypatch):
    """There rich shows what it is asked to print by itself, and would leave the text empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    if kind == "verify":
        report = hf_batchinv.verify(make("llama"), axes=["repetition"], budget=1, progress=False)
        assert "repetition" in str(report)
    else:
        assert "Linear" in str(hf_batchinv.audit(nn.Sequential(nn.Linear(8, 8))))


def test_every_notebook_is_run_by_a_test():
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        nbformat.write(execute(name), EXAMPLES / name)
