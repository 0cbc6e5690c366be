"""Policies, and the collect driver and the evaluator that run them.

collect_driver.py      the collect driver that all agents share
episode_statistics.py  statistics of episodes, and the records of metrics.jsonl
evaluation.py          evaluation on whole episodes, and videos
policies.py            random, greedy, epsilon-greedy and sampled policies
"""
