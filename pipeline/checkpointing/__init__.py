"""Saves and restores checkpoints, and checks that a run can be resumed exactly.

checkpoints.py  saves, restores and deletes checkpoints; survives a kill at any moment
exactness.py    compares what affects a run's exact results (versions, threads, configuration)
manifest.py     records digests of a checkpoint's files in the manifest that completes it
saveables.py    saves and restores variables, tensors and host values
"""
