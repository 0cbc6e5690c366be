"""Tensor operations of the agents, and their schedules, optimizers and normalizers."""

from pipeline.ops.batches import (
    clip_by_global_norm,
    first_rows,
    masked_mean,
    ordered_sum,
    row_weights,
    rows_at,
    standardize,
)
from pipeline.ops.masks import mask_out
from pipeline.ops.natural_gradient import TrustRegion, conjugate_gradient, fisher_vector_product
from pipeline.ops.normalizers import ObservationNormalizer, RewardScaler, RunningMoments
from pipeline.ops.observations import is_frame_stack, is_image, is_of_bytes
from pipeline.ops.optimizers import Adam, CenteredRMSprop, RMSprop, build_slots
from pipeline.ops.randomness import permutations, stateless_seed, stream_key
from pipeline.ops.returns import (
    discounted_returns,
    generalized_advantage_estimation,
    n_step_targets,
    one_step_targets,
    take_rows,
    v_trace,
    valid_mask,
)
from pipeline.ops.schedules import Schedule, as_schedule, linear_schedule

__all__ = [
    "Adam",
    "CenteredRMSprop",
    "ObservationNormalizer",
    "RMSprop",
    "RewardScaler",
    "RunningMoments",
    "Schedule",
    "TrustRegion",
    "as_schedule",
    "build_slots",
    "clip_by_global_norm",
    "conjugate_gradient",
    "discounted_returns",
    "first_rows",
    "fisher_vector_product",
    "generalized_advantage_estimation",
    "is_frame_stack",
    "is_image",
    "is_of_bytes",
    "linear_schedule",
    "mask_out",
    "masked_mean",
    "n_step_targets",
    "one_step_targets",
    "ordered_sum",
    "permutations",
    "row_weights",
    "rows_at",
    "standardize",
    "stateless_seed",
    "stream_key",
    "take_rows",
    "v_trace",
    "valid_mask",
]
