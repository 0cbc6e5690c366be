"""Helpers that are independent of reinforcement learning.

constraints.py        types of parameters with a limited range, and their check
die_with_parent.py    ends a process together with the process that started it
errors.py             exceptions for errors that the user can fix
execution.py          how and where TensorFlow runs: eagerly or as a graph, CPU or GPU
files.py              atomic writers, checked readers, locks
jsonl.py              logs with one JSON object per line
memory.py             memory that this process may use
processor.py          model, count and instructions of the processors
progress.py           the progress panel of a terminal, or progress lines of a log file
ray_connection.py     connection to a Ray cluster
retry.py              retries of failed writes, for example to a full disk
shutdown.py           handling of SIGINT and SIGTERM
tensorflow_import.py  import of TensorFlow with Keras 2, and of TF-Agents
"""
