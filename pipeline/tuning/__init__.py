"""Searches over hyperparameters: trials, their suggestions, successive halving and the report."""
