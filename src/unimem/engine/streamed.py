"""Streamed weights in the engine: where their headers point, and which node reads which pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unimem.backends import ggml
from unimem.engine.graph import Bringer, Headers, Wave, Waves
from unimem.engine.model import Model, UnsupportedModel
from unimem.engine.pieces_op import (
    PieceReader,
    ahead_address,
    experts_address,
    layer_address,
    wave_address,
)
from unimem.planning.needs import n_waves
from unimem.weights.tensors import StreamedTensor, Tensor

if TYPE_CHECKING:
    from unimem.weights.stream.stream import Stream


def header_of(tensor: Tensor) -> tuple[int, tuple[int, ...], int]:
    """Return ggml's type, the shape in ggml's order, and the address of a tensor.

    Experts that are streamed have a matrix for each slot of their pool; a layer that is streamed
    lies in the first slot until a node moves it.
    """
    assert tensor.ggml_type is not None  # never None in a checked model
    if not isinstance(tensor, StreamedTensor):
        return tensor.ggml_type, tensor.ne, tensor.address
    place, pieces = tensor._place, tensor._stream._pieces
    address = pieces.address(place.kind) + pieces.part_offset(place.kind, place.part) + place.offset
    ne = tensor.ne
    if tensor._stream._table.has_experts:
        ne = (*ne[:-1], pieces.max_slots(place.kind))
    return tensor.ggml_type, ne, address


def read_pieces(
    headers: Headers, model: Model, tensors: Mapping[str, Tensor], stream: Stream, batch: int
) -> PieceReader:
    """Set the strides of streamed tensors, and add what reads their pieces to `headers`.

    Graphs made from `headers` read pieces by the returned reader, for up to `batch` tokens at once.

    Raises
    ------
    UnsupportedModel
        Experts of a tensor are not its last dimension, so that they have no slots.
    """
    pieces, table, experts = stream._pieces, stream._table, model.experts
    for name, tensor in tensors.items():
        place = table.places.get(name)
        if experts and "_exps." in name and (place is None or place.n != experts.n):
            raise UnsupportedModel(
                f"tensor '{name}' has shape {list(tensor.ne)}, and experts are streamed only if "
                f"their number, {experts.n}, comes last: open it with load='map'"
            )
    most = batch * (1 if experts is None else experts.n_used)
    reader = PieceReader(pieces, most, stream.check_files)
    layers: list[dict[str, StreamedTensor]] = [{} for _ in range(model.dims.num_layers)]
    for name in table.places:
        tensor = tensors[name]
        assert isinstance(tensor, StreamedTensor)
        layers[int(name.split(".")[1])][name] = tensor
    firsts = [min((t._place.first for t in layer.values()), default=-1) for layer in layers]
    for i, (layer, first) in enumerate(zip(layers, firsts, strict=True)):
        if not layer:
            continue
        of_layer = [tensor._place for tensor in layer.values()]
        kind = of_layer[0].kind
        stride = pieces.stride(kind)
        if table.has_experts:
            for name in layer:
                header = ggml.Tensor.at(headers.weights[name])
                n = len(tensors[name].ne) - 1  # a matrix of each expert, or a row
                whole = stride * header.ne[n]
                header.nb = *header.nb[:n], stride, *(whole,) * (3 - n)
            # The last layer needs few.
            after = firsts[i + 1] if i + 2 < len(layers) else -1
            span = first, of_layer[0].n, after
            node, sizes = reader.experts(kind, *span)
            headers.experts[f"blk.{i}"] = Bringer(experts_address, node)
            headers.ahead[f"blk.{i}"] = Bringer(ahead_address, node), sizes
            if i < len(layers) - 1 and experts is not None:  # the last one computes a single token
                headers.waves[f"blk.{i}"] = _waves(reader, n_waves(experts), span)
        else:
            offsets = {
                headers.weights[name]: pieces.part_offset(kind, tensor._place.part)
                + tensor._place.offset
                for name, tensor in layer.items()
            }
            # One layer is read while another one is computed, and the next token follows.
            later = [piece for piece in (*firsts[i + 1 :], *firsts[:i]) if piece >= 0]
            pool = pieces.address(kind), stride
            node = reader.layer(first, pool, offsets, later[: _ahead(stream)])
            headers.layers[f"blk.{i}"] = Bringer(layer_address, node)
    return reader


def _waves(reader: PieceReader, n: int, span: tuple[int, int, int]) -> Waves:
    (data, sizes), *nodes = reader.waves(n, *span)
    each = [Wave(Bringer(wave_address, at), of_wave) for at, of_wave in nodes]
    return Waves(Wave(Bringer(experts_address, data), sizes), each, *reader.pairs)


def _ahead(stream: Stream) -> int:
    """Return how many of the next layers are looked at for one that has to be read."""
    n = sum(kind.n_pieces for kind in stream._table.kinds)
    n_slots = sum(stream._pieces.n_slots(i) for i in range(len(stream._table.kinds)))
    return 0 if n_slots >= n else -(-n // (n - n_slots))
