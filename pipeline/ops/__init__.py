"""Tensor operations of the agents, and their schedules, optimizers and normalizers.

batches.py           rows, means and sums of batches, and the limit of the gradients' norm
masks.py             restriction of actions to those that a mask allows
natural_gradient.py  flat vectors, conjugate gradients and Fisher products
normalizers.py       normalisation of observations and rewards by running statistics
observations.py      kinds of observations, by their specs
optimizers.py        optimizers that gin can configure
randomness.py        random numbers as functions of (run seed, stream name, counter)
returns.py           returns, advantages and n-step targets
schedules.py         values that change during training
"""
