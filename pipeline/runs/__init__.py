"""Folders, logs and source revisions of runs.

pretrained.py       the trained policies of the package
run_folder.py       the files of a run, its lock, and `--restart_behavior`
run_logs.py         metrics.jsonl, eval.jsonl and TensorBoard's event files
saved_run.py        reads a run back
source_revision.py  the git revision and a digest of the program
tensorboard_log.py  writes TensorBoard's event files
"""
