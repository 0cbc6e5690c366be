"""Searches over hyperparameters: trials, their suggestions, successive halving and the report.

halving.py        chooses the trials to train next, by successive halving
search.py         searches, described by gin files, and their suggestions
search_folder.py  records and lock of a search's folder
search_report.py  the report, and the best configuration as a gin file
tuner.py          trains the trials with several processes at a time
"""
