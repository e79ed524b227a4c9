"""Memory shared with CuPy, torch and other libraries, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu.machine import MIB, Interface, bridge, cuda, cupy, held
from support.contracts.kv_model import KV_DTYPES, as_float32, given, stored

pytestmark = pytest.mark.usefixtures("gives_memory_back")

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "uint8")


def of_torch(torch: Any, a: Any) -> Any:
    """A NumPy array as a tensor on the GPU; torch has no bfloat16 of NumPy."""
    if a.dtype.name == "bfloat16":
        return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(a).cuda()


# ---- what is the library's is everybody's ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_a_tape_are_tensors(torch: Any, dtype: str) -> None:
    with cuda.Tape(MIB) as tape:
        array = tape.take((4, 6), dtype)
        tensor = torch.from_dlpack(array)
        assert tensor.data_ptr() == array.data.ptr
        assert (tuple(tensor.shape), str(tensor.dtype)) == ((4, 6), f"torch.{dtype}")
        tensor.fill_(3)
        torch.cuda.synchronize()
        assert bridge.down(array).astype(np.float64).tolist() == [[3.0] * 6] * 4
        back = cupy.from_dlpack(tensor)
        assert (back.data.ptr, back.dtype) == (array.data.ptr, array.dtype)
        del tensor, back


def test_a_tensor_keeps_the_memory_alive(torch: Any, counted: Any) -> None:
    with cuda.Block(MIB) as block:
        tensor = torch.from_dlpack(block)
        assert (tensor.data_ptr(), tensor.numel()) == (block.address, MIB)
        with pytest.raises(BufferError, match="live views"):
            block.close()
    tensor.fill_(9)
    assert int(tensor.sum(dtype=torch.int64)) == 9 * MIB
    assert len(counted.allocated) == 1
    del tensor
    assert counted.allocated == {}


def test_a_block_has_both_protocols(torch: Any) -> None:
    for pinned in (False, True):
        with cuda.Block(MIB, pinned=pinned) as block:
            seen = [cupy.asarray(block)]
            if not pinned:  # CuPy exports it as memory of the device
                seen += [torch.as_tensor(block, device="cuda")]
                seen += [cupy.from_dlpack(block), torch.from_dlpack(block)]
            pointers = [a.data.ptr if isinstance(a, cupy.ndarray) else a.data_ptr() for a in seen]
            assert pointers == [block.address] * len(seen)
            seen.clear()
            if block.host is not None:
                here = np.from_dlpack(block.host)
                assert here.ctypes.data == block.address
                del here


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_layers_of_a_cache_are_tensors(torch: Any, dtype: str) -> None:
    with cuda.KVCache(2, 4, 32, 16, dtype=dtype) as kv:
        tokens = given(np.random.default_rng(0), (5, 4, 32), "float32")
        for layer in range(2):
            kv.append(layer, bridge.up(tokens), bridge.up(-tokens))
        k, v = kv.layer(1)
        tensor = torch.from_dlpack(k)
        assert tensor.data_ptr() == k.data.ptr
        assert tuple(tensor.shape) == k.shape == (1, 4, 5, 32)
        # The stride of the first dimension, which is 1, means nothing.
        assert [n * tensor.element_size() for n in tensor.stride()][1:] == list(k.strides[1:])
        expected = as_float32(stored(tokens, dtype)).swapaxes(0, 1)[None]
        assert np.array_equal(tensor.float().cpu().numpy(), expected)
        del tensor, k, v


# ---- what is everybody's, caches take ----


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens_dtype", ["float32", "float16", "bfloat16"])
def test_a_cache_takes_tensors(torch: Any, dtype: str, tokens_dtype: str) -> None:
    tokens = given(np.random.default_rng(1), (7, 2, 64), tokens_dtype)
    expected = as_float32(stored(tokens, dtype)).swapaxes(0, 1)[None]
    with cuda.KVCache(1, 2, 64, 64, dtype=dtype) as kv:
        k = of_torch(torch, tokens)
        strided = of_torch(torch, np.ascontiguousarray(tokens.swapaxes(0, 1))).transpose(0, 1)
        assert not strided.is_contiguous()
        for v in (k, strided, Interface(bridge.up(tokens)) if tokens_dtype != "bfloat16" else k):
            kv.clear()
            kv.append(0, k, v)
            for part in kv.layer(0):
                assert np.array_equal(as_float32(bridge.down(part)), expected)
        del part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_scratchpad_takes_tensors(torch: Any, dtype: str) -> None:
    rows = given(np.random.default_rng(2), (4, 6), "float32")
    with cuda.Scratchpad(16, 6, dtype) as pad:
        tensor = of_torch(torch, rows)
        pad.append(tensor[0])
        pad.append_batch(tensor[1:])
        pad.append_batch(tensor.T.contiguous().T)
        found = bridge.down(pad.as_array())
        assert np.array_equal(found, np.concatenate([rows, rows]).astype(found.dtype))


def test_a_tensor_that_wants_gradients_or_is_elsewhere_is_refused(torch: Any) -> None:
    with cuda.Scratchpad(16, 6) as pad:
        for wrong in (torch.zeros(6), np.zeros(6, np.float32)):
            with pytest.raises(TypeError, match="expected an array on the GPU"):
                pad.append(wrong)
        with pytest.raises((BufferError, TypeError, RuntimeError)):
            pad.append(torch.zeros(6, device="cuda", requires_grad=True))
        assert len(pad) == 0


# ---- streams ----


def test_the_stream_of_torch(torch: Any) -> None:
    with cuda.KVCache(1, 2, 64, 64, dtype="f16") as kv:
        stream = torch.cuda.Stream()
        tensor = torch.ones(1, 2, 64, device="cuda").half()
        tensor *= 1
        torch.cuda.synchronize()  # of another stream than the cache's
        kv.append(0, tensor, tensor, stream=stream)  # now the kernels are loaded
        with held(cupy.cuda.Stream.from_external(CudaStream(stream.cuda_stream))):
            with torch.cuda.stream(stream):
                tensor *= 3
            kv.append(0, without_waiting(tensor), without_waiting(tensor), stream=stream)
        for part in kv.layer(0):
            assert bridge.down(part)[0, 0, :, 0].tolist() == [1.0, 3.0]
        del part


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_cache_of_tensors_is_on_torchs_current_stream(torch: Any, dtype: str) -> None:
    tokens = given(np.random.default_rng(3), (5, 2, 64), "float32")
    expected = as_float32(stored(tokens * 2, dtype)).swapaxes(0, 1)[None]
    with cuda.KVCache(1, 2, 64, 64, dtype=dtype, arrays="torch") as kv:
        tensor = of_torch(torch, tokens)
        kv.append(0, tensor, tensor)  # now the kernels are loaded
        kv.clear()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        same = cupy.cuda.Stream.from_external(CudaStream(stream.cuda_stream))
        with held(same), torch.cuda.stream(stream):
            tensor *= 2
            kv.append(0, tensor, tensor)
            parts = kv.layer(0)
        torch.cuda.synchronize()
        for part in parts:
            assert part.data_ptr() in {kv.address(0, "k"), kv.address(0, "v")}
            assert np.array_equal(part.float().cpu().numpy(), expected)
        del part, parts


class CudaStream:
    """A stream of another library."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def without_waiting(tensor: Any) -> Any:
    """A tensor as CuPy's array, without DLPack's waiting of one stream for another."""
    return cupy.asarray(Interface(tensor))
