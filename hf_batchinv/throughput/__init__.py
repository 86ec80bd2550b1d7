"""Whole models beside stock Transformers: `python examples/throughput.py`.

* settings.py: what is measured, as plain data
* models.py: a model by name, or a published shape with random weights
* clock.py: time and memory of a device
* jobs.py: generate, prefill and scoring, each as one function that both sides run
* measure.py: from a setting to a row; no time where bits differ
* profiling.py: which operations the time goes to
* deadline.py: whether a setting still fits in the time limit
* result.py: the file of a model, written after every row
* table.py, plot.py: rows to a table and a PNG (needs matplotlib)
* command.py: arguments, measure, write, draw, print
"""
