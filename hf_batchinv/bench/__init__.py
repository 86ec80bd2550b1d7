"""Speed beside stock PyTorch on the user's GPU: `hf-batchinv bench`.

* cases.py: what is measured, as plain data
* linear.py, grouped_linear.py, attention.py, norm.py, softmax.py: a case's operands, its check of bits, the calls
* trial.py: from such a trial to a row of the result; no time where bits differ
* timing.py: the clock, the machine and its rates
* starved.py: a process of its own, cuBLASLt that cannot split K
* compilations.py: which kernels Triton compiles, for the cost of the first call
* run.py: the cases of the chosen ops with progress bars
* summary.py, table.py: rows to lines of a table
* plot.py: rows to a PNG (needs matplotlib)
* command.py: measure, write, draw, print
"""
