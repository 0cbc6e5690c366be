"""Tests of the choice of encoders, of what they compute, and of the heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy_references import (
    FOUR_ACTIONS,
    TWO_MOTORS,
    as_float32,
    assert_close,
    bound,
    dense_layers,
    float64,
    randomize,
)
from tf_agents.specs import tensor_spec

from pipeline import configuration
from pipeline.networks import encoders
from pipeline.networks.encoders import (
    QNetwork,
    create_encoder,
    encoder_precision,
    layer_norm_cnn_encoder,
    mlp_encoder,
    nature_cnn_encoder,
    small_cnn_encoder,
)
from pipeline.networks.heads import CategoricalHead, GaussianHead, QHead, ValueHead
from pipeline.networks.initializers import (
    GlorotUniform,
    HeUniform,
    Orthogonal,
    TorchUniform,
    layer_initializers,
)
from pipeline.networks.layers import ColourFramesToChannels, Conv2D, Dense, ToFloat
from pipeline.networks.sac_networks import SquashedGaussianHead
from pipeline.utils import processor
from pipeline.utils.errors import UserError

MLP, NATURE, SMALL = "mlp", "nature", "small"


def some_observations(spec: tf.TensorSpec, batch_size: int = 3) -> tf.Tensor:
    drawn = np.random.default_rng(0).integers(0, 256, (batch_size, *spec.shape))
    return tf.constant(drawn % 2 == 0 if spec.dtype == tf.bool else drawn, spec.dtype)


def convolutions(encoder: tf.keras.Sequential) -> list[tuple[Any, ...]]:
    return [
        (layer.filters, layer.kernel_size[0], layer.strides[0], layer.padding)
        for layer in encoder.layers
        if isinstance(layer, tf.keras.layers.Conv2D)
    ]


def kind_of(encoder: tf.keras.Sequential) -> str:
    layers = convolutions(encoder)
    if not layers:
        return MLP
    return NATURE if layers[0] == (32, 8, 4, "valid") else SMALL


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "features"),
    [
        ((), tf.float32, MLP, 64),
        ((4,), tf.float32, MLP, 64),
        ((128,), tf.uint8, MLP, 64),
        ((4,), tf.int64, MLP, 64),
        ((4,), tf.float64, MLP, 64),
        ((5,), tf.bool, MLP, 64),
        ((3, 7), tf.float32, MLP, 64),
        ((2, 3, 2, 2), tf.float32, MLP, 64),
        ((4, 84, 84), tf.uint8, NATURE, 512),
        ((1, 84, 84), tf.uint8, NATURE, 512),
        ((4, 36, 36), tf.uint8, NATURE, 512),
        ((4, 36, 50), tf.uint8, NATURE, 512),
        ((4, 35, 36), tf.uint8, SMALL, 128),
        ((35, 36, 4), tf.uint8, SMALL, 128),
        ((4, 84, 84), tf.float32, SMALL, 128),
        ((10, 10, 4), tf.bool, SMALL, 128),
        ((10, 10, 4), tf.float32, SMALL, 128),
        ((7, 7, 3), tf.uint8, SMALL, 128),
        ((96, 96, 3), tf.uint8, SMALL, 128),
        ((1, 1, 1), tf.float32, SMALL, 128),
        ((3, 64, 64), tf.float32, SMALL, 128),
        ((4, 84, 84, 3), tf.uint8, SMALL, 128),
        ((4, 16, 16, 1), tf.float32, SMALL, 128),
    ],
)
def test_encoder_of(shape: tuple[int, ...], dtype: tf.DType, kind: str, features: int) -> None:
    spec = tf.TensorSpec(shape, dtype)
    encoder = create_encoder(spec)
    outputs = encoder(some_observations(spec))
    assert outputs.shape == [3, features] and outputs.dtype == tf.float32
    assert kind_of(encoder) == kind
    assert np.ptp(outputs, axis=0).any(), "the observation does not reach the features"


def test_layers_of_ones_own_replace_the_choice() -> None:
    spec = tf.TensorSpec((10, 10, 3), tf.uint8)
    with bound({"create_encoder.layers": mlp_encoder, "mlp_encoder.units": (5,)}):
        encoder = create_encoder(spec)
        unlike = create_encoder(spec, of_vectors=lambda: [])
    assert kind_of(encoder) == kind_of(unlike) == MLP
    assert encoder(some_observations(spec)).shape == [3, 5]


def test_images_of_a_nest_may_have_layers_of_ones_own() -> None:
    spec = {
        "camera": tf.TensorSpec((4, 40, 40), tf.uint8),
        "speed": tf.TensorSpec((2,), tf.float32),
    }
    with bound({"create_encoder.image_layers": mlp_encoder, "mlp_encoder.units": (5,)}):
        encoder = create_encoder(spec, of_vectors=lambda: [])
        assert encoder(tensor_spec.zero_spec_nest(spec, outer_dims=[3])).shape == [3, 5 + 2]
        for without in (spec["camera"], {"speed": spec["speed"]}):
            with pytest.raises(UserError, match="image_layers is for the images of a Dict or Tupl"):
                create_encoder(without)
    with (
        bound({"create_encoder.image_layers": lambda: [tf.keras.layers.ReLU()]}),
        pytest.raises(UserError, match=r"create_encoder\.image_layers .* of shape \(4, 40, 40\)"),
    ):
        create_encoder(spec)


def test_layers_that_make_no_vectors_are_refused() -> None:
    message = r"create_encoder\.layers .* features of shape \(10, 10, 3\)"
    with (
        bound({"create_encoder.layers": lambda: [tf.keras.layers.ReLU()]}),
        pytest.raises(UserError, match=message),
    ):
        create_encoder(tf.TensorSpec((10, 10, 3), tf.uint8))


def test_nature_cnn_has_the_published_layers() -> None:
    spec = tf.TensorSpec((4, 84, 84), tf.uint8)
    encoder = create_encoder(spec)
    encoder(some_observations(spec))
    assert convolutions(encoder) == [(32, 8, 4, "valid"), (64, 4, 2, "valid"), (64, 3, 1, "valid")]
    shapes = [v.shape.as_list() for v in encoder.trainable_variables[::2]]
    assert shapes == [[8, 8, 4, 32], [4, 4, 32, 64], [3, 3, 64, 64], [3136, 512]]


@pytest.mark.parametrize(
    ("side", "largest", "halvings"),
    [(10, 24, 0), (24, 24, 0), (25, 24, 1), (48, 24, 1), (96, 24, 2), (48, 48, 0), (96, 48, 1)],
)
def test_large_images_are_halved_before_the_small_cnn(
    side: int, largest: int, halvings: int
) -> None:
    spec = tf.TensorSpec((side, 8, 3), tf.float32)
    with bound({"small_cnn_encoder.largest_side": largest}):
        encoder = create_encoder(spec)
    encoder(some_observations(spec))
    expected = [(16, 3, 2, "same")] * halvings + [(16, 3, 1, "same"), (32, 3, 1, "same")]
    assert convolutions(encoder) == expected
    dense_inputs = encoder.trainable_variables[-2].shape[0]
    assert dense_inputs <= largest * largest * 32


@pytest.mark.parametrize("shape", [(4, 36, 36), (8, 8, 3), (5,)])
def test_mixed_precision_computes_in_bfloat16_on_float32_weights(shape: tuple[int, ...]) -> None:
    spec = tf.TensorSpec(shape, tf.uint8)
    observations = some_observations(spec)
    precise = create_encoder(spec)
    expected = precise(observations)
    with bound({"encoder_precision.policy": "mixed_bfloat16"}):
        encoder = create_encoder(spec)
    encoder(observations)
    encoder.set_weights(precise.get_weights())
    outputs = encoder(observations)
    assert {v.dtype for v in encoder.trainable_variables} == {tf.float32}
    assert outputs.dtype == tf.float32
    assert np.array_equal(outputs, tf.cast(tf.cast(outputs, tf.bfloat16), tf.float32))
    assert not np.array_equal(outputs, expected)
    # bfloat16 has 8 significant bits.
    np.testing.assert_allclose(outputs, expected, atol=0.05 * np.abs(expected).max())


def test_the_layer_norm_encoder_normalises_the_features_of_the_convolutions() -> None:
    spec = tf.TensorSpec((4, 36, 36), tf.uint8)
    with bound({"create_encoder.layers": layer_norm_cnn_encoder}):
        encoder = create_encoder(spec)
    observations = some_observations(spec)
    features = encoder(observations)
    randomize(np.random.default_rng(0), encoder.trainable_variables)
    kernel, bias, scale, shift = encoder.get_weights()[-4:]
    *convolutions, _, _, _, _ = encoder.layers
    hidden = float64(tf.keras.Sequential(convolutions)(observations)) @ kernel + bias
    deviation = hidden - hidden.mean(1, keepdims=True)
    standardised = deviation / np.sqrt((deviation**2).mean(1, keepdims=True) + 1e-3)
    assert features.shape == (len(observations), 50)
    assert_close(encoder(observations), np.tanh(standardised * scale + shift), 1e-4)


@pytest.mark.parametrize("execution", [tf.function, lambda function: function])
def test_gradients_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch, execution: Any) -> None:
    """In bfloat16, a sum of ones stays at 256. Constants are folded without oneDNN."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    dense = Dense(3, dtype="mixed_bfloat16")
    convolution = Conv2D(3, 1, dtype="mixed_bfloat16")

    @execution
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            outputs = dense(tf.ones([5_000, 4])), convolution(tf.ones([5_000, 1, 1, 4]))
            total = tf.add_n([tf.reduce_sum(tf.cast(x, tf.float32)) for x in outputs])
        return tape.gradient(total, dense.variables + convolution.variables)

    for gradient in gradients():
        np.testing.assert_allclose(gradient, np.full(gradient.shape, 5_000.0), rtol=0.01)


@pytest.mark.parametrize(
    ("flags", "onednn", "chosen"),
    [
        ("fma avx512f avx512_bf16", "1", "mixed_bfloat16"),
        ("avx2 amx_bf16 amx_tile", "1", "mixed_bfloat16"),
        ("avx2 amx_bf16 amx_tile", "0", "float32"),
        ("fma avx2 avx512f avx512_vnni amx_int8", "1", "float32"),
        ("", "1", "float32"),
    ],
)
def test_the_automatic_precision_is_bfloat16_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, flags: str, onednn: str, chosen: str
) -> None:
    monkeypatch.setattr(processor, "_cpu_info", lambda name: flags or None)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    with bound({"encoder_precision.policy": "auto"}):
        assert encoder_precision() == chosen
    monkeypatch.setattr(encoders, "accelerator", lambda: "/GPU:0")
    with bound({"encoder_precision.policy": "auto"}):
        assert encoder_precision() == "float32"


def test_an_unknown_precision_is_refused() -> None:
    with bound({"encoder_precision.policy": "float16"}), pytest.raises(UserError, match="float16"):
        create_encoder(tf.TensorSpec((5,), tf.float32))


@pytest.mark.parametrize("shape", [(4, 36, 36), (8, 8, 3), (128,), (2, 8, 8, 3)])
def test_bytes_are_scaled_to_one(shape: tuple[int, ...]) -> None:
    for spec in (tf.TensorSpec(shape, tf.uint8), byte_spec(shape, 255)):
        to_float = create_encoder(spec).layers[0]
        assert isinstance(to_float, ToFloat)
        values = to_float(tf.constant([0, 51, 255], tf.uint8))
        assert_close(values, [0.0, 0.2, 1.0], 1e-6)


def byte_spec(shape: tuple[int, ...], maximum: int) -> tensor_spec.BoundedTensorSpec:
    return tensor_spec.BoundedTensorSpec(shape, tf.uint8, 0, maximum)


def test_pixels_that_are_floats_already_are_not_scaled() -> None:
    z_scores = as_float32([-3.0, 0.5])
    np.testing.assert_array_equal(ToFloat(1 / 255)(z_scores), z_scores)


@pytest.mark.parametrize(
    "spec",
    [byte_spec((3,), 9), byte_spec((7, 7, 3), 10), tf.TensorSpec((5, 5, 2), tf.bool)],
    ids=["codes", "grid of codes", "switches"],
)
def test_what_are_no_bytes_keep_their_scale(spec: tf.TensorSpec) -> None:
    to_float = create_encoder(spec).layers[0]
    values = to_float(tf.cast([0, 1, 1], spec.dtype))
    np.testing.assert_array_equal(values, as_float32([0, 1, 1]))


@pytest.mark.parametrize("shape", [(3, 40, 30), (4, 40, 30), (9, 40, 50), (2, 40, 30, 3)])
def test_convolutions_see_height_and_width(shape: tuple[int, ...]) -> None:
    spec = tf.TensorSpec(shape, tf.float32)
    encoder = create_encoder(spec)
    observations = some_observations(spec)
    encoder(observations)
    first = next(x for x in encoder.layers if isinstance(x, tf.keras.layers.Conv2D))
    channels = shape[0] * (shape[3] if len(shape) == 4 else 1)
    assert first.input_shape[1:] == (*shape[1:3], channels)


def test_colour_frames_become_channels() -> None:
    frames = some_observations(tf.TensorSpec((2, 5, 6, 3), tf.float32))
    channels = ColourFramesToChannels()(frames)
    assert channels.shape == [3, 5, 6, 6]
    np.testing.assert_array_equal(channels[..., :3], frames[:, 0])
    np.testing.assert_array_equal(channels[..., 3:], frames[:, 1])


def test_mlp_equals_numpy() -> None:
    with bound({"mlp_encoder.units": (7, 5), "mlp_encoder.activation": "tanh"}):
        encoder = create_encoder(tf.TensorSpec((2, 3), tf.float32))
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    encoder(x)
    randomize(np.random.default_rng(1), encoder.trainable_variables)
    w0, b0, w1, b1 = float64(encoder.trainable_variables)
    expected = np.tanh(np.tanh(x.reshape(4, 6) @ w0 + b0) @ w1 + b1)
    assert_close(encoder(x), expected)


@pytest.mark.parametrize("gain", ["'0.01'", "None", "True"])
def test_a_gain_that_is_no_number_is_refused(gain: str) -> None:
    message = r"policy/Orthogonal\.gain = .*a number"
    with configuration.preserved(), pytest.raises(UserError, match=message):
        configuration.load([], [f"policy/Orthogonal.gain = {gain}"])


@pytest.mark.parametrize("gain", [1.0, 1.4142135, 0.01])
def test_orthogonal_initialiser_has_its_gain(gain: float) -> None:
    with bound({"Orthogonal.gain": gain}):
        layers = mlp_encoder((16,), "relu", Orthogonal)
        head = ValueHead(Orthogonal)
    layers[1].build([None, 40])
    kernel = layers[1].kernel.numpy()
    assert_close(kernel.T @ kernel, gain**2 * np.eye(16), 1e-4)
    head(tf.zeros([1, 40]))
    assert_close(np.linalg.norm(head.value.kernel), gain, 1e-4)


@pytest.mark.parametrize(
    ("initializer", "limit"),
    [(GlorotUniform, np.sqrt(6 / (300 + 200))), (HeUniform, np.sqrt(6 / 300))],
)
def test_uniform_initialisers_have_their_limits(initializer: Any, limit: float) -> None:
    tf.keras.utils.set_random_seed(1)
    layers = mlp_encoder((200,), "relu", initializer)
    layers[1].build([None, 300])
    kernel = layers[1].kernel.numpy()
    assert 0.99 * limit < np.abs(kernel).max() <= limit * (1 + 1e-6)  # of float32
    assert not layers[1].bias.numpy().any()


def test_layers_do_not_share_one_draw() -> None:
    layers = mlp_encoder((8, 8), "relu", Orthogonal)
    for layer in layers[1:]:
        layer.build([None, 8])
    assert np.any(layers[1].kernel.numpy() != layers[2].kernel.numpy())


def test_headed_network_is_the_head_on_the_encoder() -> None:
    spec = tf.TensorSpec((3,), tf.float32)
    network = QNetwork(spec, create_encoder(spec), QHead(4), "q_network")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    q_values, state = network(x)
    assert state == ()
    assert_close(q_values, dense_layers(x, float64(network.variables)))
    assert_close(network.head(network.encoder(x)), q_values)


def test_value_head_drops_the_last_dimension() -> None:
    assert ValueHead()(tf.zeros([5, 3])).shape == [5]


def test_categorical_head() -> None:
    head = CategoricalHead(FOUR_ACTIONS, GlorotUniform)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    distribution = head(x)
    kernel, bias = float64(head.trainable_variables)
    odds = np.exp(x @ kernel + bias)
    assert_close(distribution.probs_parameter(), odds / odds.sum(-1, keepdims=True))
    assert distribution.dtype == tf.int32 and distribution.mode().dtype == tf.int32


def test_gaussian_head() -> None:
    head = GaussianHead(TWO_MOTORS, GlorotUniform, initial_log_std=-1.0)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    distribution = head(x)
    kernel, bias = float64([head.mean.kernel, head.mean.bias])
    # The bounds are [-1, 3] and [0, 0.5].
    half = np.array([2.0, 0.25])
    mean, std = [1.0, 0.25] + half * (x @ kernel + bias), half * np.exp(-1.0)
    assert_close(distribution.mode(), mean)
    action = as_float32([0.3, -0.7])
    densities = -0.5 * ((action - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))
    assert_close(distribution.log_prob(action), densities.sum(-1))
    entropy = np.sum(0.5 * np.log(2 * np.pi * np.e) + np.log(std))
    assert_close(distribution.entropy(), np.full(5, entropy))
    assert any(v is head.log_std for v in head.trainable_variables)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_gaussian_head_has_the_shape_of_the_action(shape: tuple[int, ...]) -> None:
    head = GaussianHead(tensor_spec.BoundedTensorSpec(shape, tf.float32, -1, 1), Orthogonal)
    distribution = head(tf.ones([5, 3]))
    assert distribution.mode().shape == [5, *shape]
    assert distribution.log_prob(distribution.mode()).shape == [5]


def convolve(images: np.ndarray, weights: list[np.ndarray], stride: int) -> np.ndarray:
    """Convolves images [B, height, width, channels] without padding, and applies ReLU."""
    kernel, bias = weights
    size = kernel.shape[0]
    axes: Any = (1, 2)
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axes)
    windows = windows[:, ::stride, ::stride]
    return np.maximum(np.einsum("byxcij,ijco->byxo", windows, kernel) + bias, 0)


def test_the_small_cnn_equals_numpy() -> None:
    encoder = create_encoder(tf.TensorSpec((8, 8, 3), tf.float32))
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    features = encoder(images)
    weights = float64(encoder.trainable_weights)
    for first in (0, 2):
        padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)])
        images = convolve(padded, weights[first : first + 2], 1)
    expected = np.maximum(images.reshape(2, -1) @ weights[4] + weights[5], 0)
    assert_close(features, expected, 1e-4)


def test_the_network_of_2015_pads_its_first_convolution() -> None:
    spec = tf.TensorSpec((4, 84, 84), tf.uint8)
    with bound({"nature_cnn_encoder.first_padding": 1}):
        encoder = create_encoder(spec)
    frames = some_observations(spec, 2)
    features = encoder(frames)
    weights = float64(encoder.trainable_weights)
    assert [w.shape[-1] for w in weights[::2]] == [32, 64, 64, 512]
    images = np.transpose(frames.numpy() / 255, [0, 2, 3, 1])
    images = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)])
    assert convolve(images, weights[:2], 4).shape == (2, 20, 20, 32)
    for i, stride in enumerate((4, 2, 1)):
        images = convolve(images, weights[2 * i : 2 * i + 2], stride)
    expected = np.maximum(images.reshape(2, -1) @ weights[6] + weights[7], 0)
    assert_close(features, expected, 1e-4)
    plain = create_encoder(spec)
    plain(frames)
    plain.set_weights(encoder.get_weights())
    assert np.abs(plain(frames) - expected).max() > 0.01  # it sees frames shifted by a pixel


def test_torch_draws_weights_and_biases_from_one_range() -> None:
    tf.keras.utils.set_random_seed(1)
    with bound({"nature_cnn_encoder.kernel_initializer": TorchUniform}):
        network = tf.keras.Sequential(
            [*create_encoder(tf.TensorSpec((4, 84, 84), tf.uint8)).layers, QHead(6, TorchUniform)]
        )
        network(tf.zeros([1, 4, 84, 84], tf.uint8))
    kernels, biases = network.get_weights()[::2], network.get_weights()[1::2]
    inputs = [4 * 8 * 8, 32 * 4 * 4, 64 * 3 * 3, 64 * 7 * 7, 512]
    for kernel, bias, number in zip(kernels, biases, inputs, strict=True):
        for values, margin in ((kernel, 0.03), (bias, 0.7)):
            limit = 1 / np.sqrt(number)
            assert (1 - margin) * limit < np.abs(values).max() <= limit * (1 + 1e-6)
            assert abs(values.mean()) < limit * margin


def test_networks_of_sac_have_the_biases_of_torch_too() -> None:
    spec = tensor_spec.BoundedTensorSpec((2,), tf.float32, -1, 1)
    head = SquashedGaussianHead(spec, (8,), TorchUniform)
    head(tf.ones([1, 4]))
    hidden, parameters = head.get_weights()[1::2]
    for bias, number in ((hidden, 4), (parameters, 8)):
        assert bias.any() and np.abs(bias).max() <= 1 / np.sqrt(number)


def test_other_initialisers_leave_biases_at_zero() -> None:
    head = QHead(6)
    head(tf.ones([1, 8]))
    assert not head.get_weights()[1].any()
    assert head.get_weights()[0].any()


@pytest.mark.parametrize(
    ("encoder", "shape", "dtype"),
    [
        ("mlp_encoder", (4,), tf.float32),
        ("nature_cnn_encoder", (4, 84, 84), tf.uint8),
        ("small_cnn_encoder", (10, 10, 4), tf.bool),
    ],
)
@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("units", (0,), r"units\[0\] = 0: must be a whole number, at least 1"),
        ("units", (64, "a"), r"units\[1\] = 'a': must be a whole number"),
        ("activation", "foo", "activation = 'foo': Keras has no activation of this"),
        ("filters", ((32, 8, 4), (0, 4, 2)), r"filters\[1\]\[0\] = 0: must be a whole number"),
        ("filters", (), r"filters = \(\): must have at least one convolution"),
        ("filters", ((32, 8),), r"filters\[0\] = \(32, 8\): must be \(channels, kernel, stride"),
    ],
)
def test_layers_that_cannot_be_made_are_refused_by_the_encoder_s_name(
    encoder: str, shape: tuple[int, ...], dtype: tf.DType, parameter: str, value: Any, message: str
) -> None:
    if parameter == "filters" and encoder == "mlp_encoder":
        pytest.skip("it has no filters")
    with (
        bound({f"{encoder}.{parameter}": value}),
        pytest.raises(UserError, match=rf"{encoder}\.{message}"),
    ):
        create_encoder(tf.TensorSpec(shape, dtype))


@pytest.mark.parametrize("kernel", [8, 9])
def test_a_kernel_larger_than_its_input_is_named(kernel):
    filters = ((32, 8, 4), (64, 4, 2), (64, kernel, 1))
    with bound({"nature_cnn_encoder.filters": filters}):
        create_encoder(tf.TensorSpec((4, 88, 88), tf.uint8))  # 88, 21 and 9 pixels
        said = rf"nature_cnn_encoder\.filters\[2\] has a kernel of {kernel}.* 9 x 7 pixels"
        with pytest.raises(UserError, match=said):
            create_encoder(tf.TensorSpec((4, 84, 75), tf.uint8))


@pytest.mark.parametrize(
    ("layers", "shape"), [(nature_cnn_encoder, (4,)), (small_cnn_encoder, (40, 40, 3))]
)
def test_layers_that_do_not_fit_the_observation_are_named(layers, shape):
    spec = tf.TensorSpec(shape, tf.float32)
    with bound({"create_encoder.layers": layers}):
        said = f"create_encoder.layers = @{layers.__name__} cannot encode TensorSpec"
        with pytest.raises(UserError, match=said):
            create_encoder(spec)


class Counting(tf.keras.layers.Layer):
    """Layer with a running count of its calls."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


SHARED = tf.keras.layers.Dense(3)


class Wrapper(tf.keras.layers.Layer):
    """New layer around one that all instances share."""

    inner = tf.keras.layers.Dense(3)

    def __init__(self):
        super().__init__()
        self.shared = self.inner

    def call(self, inputs):
        return self.shared(inputs)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: [SHARED], "a layer that another encoder has"),
        (lambda: [Wrapper()], "a layer that another encoder has"),
        (lambda: [tf.keras.layers.Flatten], "which is not a Keras layer"),
        (lambda: [mlp_encoder()], "which is not a Keras layer"),
        (lambda: [tf.nn.relu], "which is not a Keras layer"),
        (
            lambda: [tf.keras.layers.Dense(3, kernel_initializer=HeUniform(seed=3))],
            "seed of its own",
        ),
        (
            lambda: [tf.keras.layers.Lambda(lambda x: x / tf.reduce_max(tf.abs(x) + 1e-6))],
            "depend on the rest of its batch",
        ),
        (
            lambda: [tf.keras.layers.Lambda(lambda x: tf.reduce_mean(x, 0, keepdims=True))],
            "depend on the rest of its batch",
        ),
        (lambda: [Counting()], "a call changes variables"),
        (
            lambda: [
                tf.keras.layers.Dense(3),
                tf.keras.layers.Lambda(lambda x: tf.cast(10.0 * x, tf.int32)),
            ],
            "no gradient for .*dense.*kernel",
        ),
        (
            lambda: [tf.keras.layers.Dense(3, kernel_regularizer=tf.keras.regularizers.L2(1.0))],
            "regularizer",
        ),
        (
            lambda: [tf.keras.layers.Dense(3), tf.keras.layers.Dropout(0.5)],
            "computes otherwise with training=True",
        ),
        (lambda: [tf.keras.layers.BatchNormalization()], "computes otherwise with training=True"),
        (
            lambda: [
                tf.keras.Sequential(
                    [tf.keras.layers.Dense(3, kernel_initializer=tf.keras.initializers.HeNormal(1))]
                )
            ],
            "HeNormal has a seed of its own",
        ),
        (
            lambda: [
                tf.keras.layers.Dense(
                    3, bias_initializer=tf.keras.initializers.RandomUniform(seed=1)
                )
            ],
            "RandomUniform has a seed of its own",
        ),
    ],
)
def test_layers_that_agents_cannot_use_are_refused(layers, message):
    if "another" in message:
        with bound({"create_encoder.layers": layers}):
            create_encoder(tf.TensorSpec((4,), tf.float32))
    with bound({"create_encoder.layers": layers}), pytest.raises(UserError, match=message):
        create_encoder(tf.TensorSpec((4,), tf.float32))


@pytest.mark.parametrize("layer", [tf.keras.layers.Dropout, tf.keras.layers.BatchNormalization])
def test_layers_that_compute_otherwise_in_training_are_refused_for_images(layer) -> None:
    def layers() -> list[tf.keras.layers.Layer]:
        rate = [0.5] * (layer is tf.keras.layers.Dropout)
        return [tf.keras.layers.Conv2D(8, 3), layer(*rate), tf.keras.layers.Flatten()]

    spec = tensor_spec.BoundedTensorSpec((12, 12, 3), tf.uint8, 0, 255)
    message = "computes otherwise with training=True"
    with bound({"create_encoder.layers": layers}), pytest.raises(UserError, match=message):
        create_encoder(spec)


def test_a_new_layer_may_have_its_weights_already() -> None:
    def layers() -> list[tf.keras.layers.Layer]:
        inputs = tf.keras.Input([4])
        return [tf.keras.Model(inputs, tf.keras.layers.Dense(3)(inputs))]

    with bound({"create_encoder.layers": layers}):
        first, second = (create_encoder(tf.TensorSpec((4,), tf.float32)) for _ in range(2))
    assert first.trainable_variables[0] is not second.trainable_variables[0]


@pytest.mark.parametrize(
    "spec",
    [
        tf.TensorSpec((4, 20, 20), tf.uint8),
        tensor_spec.BoundedTensorSpec((), tf.int64, 0, 4),
        tensor_spec.BoundedTensorSpec((3,), tf.float32, -1.0, 1.0),
        {"a": tf.TensorSpec((2,), tf.float64), "b": tf.TensorSpec((1,), tf.int32)},
    ],
)
def test_usual_layers_of_ones_own_are_accepted(spec):
    def layers():
        twice = tf.keras.layers.ReLU()
        return [
            tf.keras.layers.Flatten(),
            twice,
            tf.keras.layers.Dense(8),
            twice,
            tf.keras.layers.LayerNormalization(),
            tf.keras.layers.Dense(8, "tanh", kernel_initializer="orthogonal"),
        ]

    with bound({"create_encoder.layers": layers}):
        features = create_encoder(spec)(tensor_spec.zero_spec_nest(spec, outer_dims=[2]))
    assert features.shape == (2, 8)


def test_an_initializer_with_a_seed_is_refused():
    with pytest.raises(UserError, match="HeUniform has a seed of its own"):
        layer_initializers(lambda: HeUniform(seed=3))
