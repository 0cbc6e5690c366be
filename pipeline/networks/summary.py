"""Summarises the networks of an agent layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
import tree
from tf_agents.specs import tensor_spec

from pipeline.networks.encoders import Network
from pipeline.networks.layers import EncodeArrays


class _Row(NamedTuple):
    name: str
    shape: str
    parameters: str


def summarize(networks: Mapping[str, tf.Module], observation_spec: Any) -> str:
    """Returns a table with the layers of networks: names, output shapes and numbers of weights.

    Args:
      networks: Networks by their names. Their encoders are called with an observation of zeros to
        determine the output shapes.
      observation_spec: Spec of one observation.
    """
    observation = tensor_spec.zero_spec_nest(observation_spec, outer_dims=[1])
    rows: list[_Row] = []
    shown: dict[int, str] = {}
    for name, network in networks.items():
        if not network.trainable_variables:
            continue
        rows.append(_Row(name, "", f"{_size(network.trainable_variables):,}"))
        for part, layer in _layers(network):
            if id(layer) in shown:
                rows.append(_Row(f"  {part}", f"the same as {shown[id(layer)]}", ""))
                continue
            shown[id(layer)] = f"{name}.{part}" if part else name
            indent = "  "
            if part:
                rows.append(_Row(f"  {part}", "", ""))
                indent = "    "
            found = _weights(layer)
            if part.endswith("encoder") or name.endswith("encoder"):
                with contextlib.suppress(Exception):  # It may encode something else.
                    found = _run(layer, observation)
            rows += [row._replace(name=indent + row.name) for row in found]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        f"{row.name:<{widths[0]}}  {row.shape:<{widths[1]}}  {row.parameters:>{widths[2]}}".rstrip()
        for row in rows
    )


def _layers(network: tf.Module) -> list[tuple[str, tf.keras.layers.Layer]]:
    """Returns the parts of a network by their names, or [("", network)] if it is one layer."""
    is_layer = isinstance(network, tf.keras.layers.Layer) and not isinstance(network, Network)
    return [("", network)] if is_layer else _parts(network)


def _parts(module: tf.Module) -> list[tuple[str, tf.keras.layers.Layer]]:
    """Returns the layers in a module in the order in which they are called."""
    if isinstance(module, tf.keras.Sequential):
        return [(layer.name, layer) for layer in module.layers]
    parts = vars(module).items()
    return [(name, part) for name, part in parts if isinstance(part, tf.keras.layers.Layer)]


def _run(layer: tf.keras.layers.Layer, inputs: Any) -> list[_Row]:
    """Returns a row for each layer, in the order in which they are called with `inputs`."""
    if isinstance(layer, tf.keras.Sequential):
        rows = []
        for inner in layer.layers:
            rows += _run(inner, inputs)
            inputs = inner(inputs)
        return rows
    outputs = layer(inputs)
    if isinstance(layer, EncodeArrays):
        return [*_run_each(layer, inputs), _Row("concatenation", _shape(outputs), "")]
    size = _size(layer.trainable_variables)
    return [_Row(type(layer).__name__, _shape(outputs), f"{size:,}" if size else "")]


def _run_each(layer: EncodeArrays, inputs: Any) -> Iterator[_Row]:
    arrays = zip(tree.flatten_with_path(inputs), layer.encoders, strict=True)
    for (path, array), encoder in arrays:
        name, rows = ".".join(map(str, path)), _run(encoder, array)
        if not encoder.trainable_variables:
            yield _Row(name, f"{_shape(array)} -> {_shape(encoder(array))}", "")
            continue
        yield _Row(name, _shape(array), "")
        yield from (row._replace(name=f"  {row.name}") for row in rows)


def _weights(layer: tf.keras.layers.Layer) -> list[_Row]:
    """Returns a row for each layer with weights.

    The output shape is read from the weights, because the inputs of these layers are unknown.
    """
    parts = [part for _, part in _parts(layer)]
    rows = [row for part in parts for row in _weights(part)]
    of_parts = {id(variable) for part in parts for variable in part.trainable_variables}
    own = [variable for variable in layer.trainable_variables if id(variable) not in of_parts]
    if not own:
        return rows
    width = tuple(own[0].shape[-1:])
    return [*rows, _Row(type(layer).__name__, str(width), f"{_size(own):,}")]


def _shape(tensors: Any) -> str:
    flat = tf.nest.flatten(tensors)
    return ", ".join(str(tuple(tensor.shape[1:])) for tensor in flat)


def _size(variables: Any) -> int:
    return sum(variable.shape.num_elements() for variable in variables)
