"""Tensors of torch over unimem's memory, and in it: caches, tapes, the tensors of a model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unimem as um
import unimem.torch as ut
from support.files import gguf_files as gf
from support.files import safetensors_files as sf

pytestmark = pytest.mark.slow  # importing torch takes seconds

N, HEADS, DIM = 3, 2, 32
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Types of torch and unimem that tapes have.
TAKEN = tuple(
    """
    float32 float16 bfloat16 float64 int8 uint8 int32 int64 bool uint16 complex64 float8_e4m3fn
    float8_e5m2 float8_e8m0fnu
""".split()
)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch (extra torch) is not installed")


def tokens(torch: Any, dtype: str, *shape: int) -> Any:
    return torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))


# ---- into caches ----


@pytest.mark.parametrize("kind", DTYPES)
def test_tensors_go_in(torch: Any, kind: str) -> None:
    k = tokens(torch, DTYPES[kind], N, HEADS, DIM)
    layouts = {
        "plain": k,
        "strides": tokens(torch, DTYPES[kind], HEADS, N, DIM).transpose(0, 1),
        "a part": tokens(torch, DTYPES[kind], N + 2, HEADS, DIM + 8)[2:, :, 8:],
        "expanded": k[:1].expand(N, -1, -1),
        "a parameter": torch.nn.Parameter(k.clone()),
        "in a graph": torch.nn.Parameter(k.clone()) * 1,
        "no token": k[:0],
    }
    for given in layouts.values():
        want = given.detach()
        with (
            um.KVCache(1, HEADS, DIM, 8, dtype=kind) as kv,
            um.PagedKVCache(1, HEADS, DIM, n_blocks=2, dtype=kind) as pool,
            pool.sequence() as sequence,
            um.Scratchpad(8, DIM, DTYPES[kind]) as pad,
        ):
            kv.append(0, given, given)
            sequence.append(0, given, given)
            pad.append_batch(given[:, 0])
            found = torch.from_dlpack(kv.layer(0)[0])[0].transpose(0, 1)
            assert torch.equal(found, want)
            assert torch.equal(ut.tensor(sequence.gather(0)[1]).transpose(0, 1), want)
            assert torch.equal(torch.from_dlpack(pad.as_array()), want[:, 0])
            del found
            gc.collect()


def test_values_that_torch_negates_lazily_keep_their_sign(torch: Any) -> None:
    """The sign of such a tensor is a bit of torch's, and not in its memory."""
    parts = tokens(torch, "float32", 2, N, HEADS, DIM)
    given = torch.complex(parts[0], parts[1]).conj().imag
    assert given.is_neg()
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        kv.append(0, given, given)
        k, v = (torch.from_dlpack(part)[0].transpose(0, 1).clone() for part in kv.layer(0))
        assert torch.equal(k, -parts[1])
        assert torch.equal(v, -parts[1])
        out = torch.complex(*torch.zeros(2, 1, HEADS, N, DIM)).conj().imag
        with pytest.raises(TypeError, match="negated or conjugated lazily"):
            kv.layer(0, "f32", out=(out, out))
    for lazy in (given, torch.complex(parts[0], parts[1]).conj()):
        with pytest.raises(TypeError, match=r"resolve_conj\(\)\.resolve_neg\(\)"):
            ut.tensor(lazy)


def test_an_append_takes_no_capsule_and_holds_nothing(torch: Any, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("__dlpack__ was called")

    if getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) is None:
        pytest.skip("this torch has no C exchange API: tensors go through __dlpack__")
    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    k = tokens(torch, "bfloat16", 100, HEADS, DIM)  # copied without the interpreter's lock
    before = sys.getrefcount(k)
    with um.KVCache(1, HEADS, DIM, 100, dtype="bf16") as kv:
        kv.append(0, k, k)
        assert (kv.seq_len, sys.getrefcount(k)) == (100, before)


def fake(torch: Any) -> Any:
    """A tensor that claims to be in main memory, as torch traces programs with."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(N, HEADS, DIM)


# Each with a word of its message.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "on no device": (lambda torch: torch.empty(N, HEADS, DIM, device="meta"), "says: "),
    "traced": (fake, "got one without memory"),
    "sparse": (lambda torch: torch.ones(N, HEADS, DIM).to_sparse(), "got a Tensor that says"),
    "integers": (lambda torch: torch.ones(N, HEADS, DIM, dtype=torch.int32), "got int32"),
    "a list": (lambda torch: list(torch.ones(N, HEADS, DIM)), "got list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(torch: Any, case: str) -> None:
    make, said = REFUSED[case]
    with um.KVCache(1, HEADS, DIM, 8) as kv:
        with pytest.raises(TypeError, match=f"k: expected .*{said}"):
            kv.append(0, make(torch), make(torch))
        assert kv.seq_len == 0


@pytest.mark.parametrize("kind", DTYPES)
def test_copies_go_out(torch: Any, kind: str) -> None:
    k = tokens(torch, "float32", N, HEADS, DIM)
    dtype = getattr(torch, DTYPES[kind])
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        kv.append(0, k, k)
        out = torch.empty(2, 1, HEADS, N, DIM, dtype=dtype)
        pair = out[0], out[1]
        assert kv.layer(0, dtype, out=pair) is pair
        assert torch.equal(out[1][0].transpose(0, 1), k.to(dtype))


# ---- out of them ----


@pytest.mark.parametrize("dtype", TAKEN)
def test_a_take_like_torch(torch: Any, dtype: str) -> None:
    with um.Tape(4096) as tape:
        before = tape.take_address(0)
        taken = tape.take((2, 3), getattr(torch, dtype), like=torch)
        assert (taken.dtype, tuple(taken.shape)) == (getattr(torch, dtype), (2, 3))
        assert taken.data_ptr() == before
        assert tape.owns(taken)
        taken.view(torch.uint8).fill_(1)
        assert (np.asarray(tape.block)[: taken.nbytes] == 1).all()
        with pytest.raises(BufferError, match="live view"):
            tape.close()
        del taken
        gc.collect()
        tape.close()


def test_a_take_of_what_torch_has_not(torch: Any) -> None:
    with um.Tape(4096) as tape:
        with pytest.raises(TypeError, match=r"^like: expected .*float8_e3m4.*says: "):
            tape.take(8, "float8_e3m4", like=torch)
        assert (tape.used_bytes, tape.n_takes) == (0, 0)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_view_is_a_tensor(torch: Any, kind: str) -> None:
    with um.KVCache(1, HEADS, DIM, 8, dtype=kind) as kv:
        k = tokens(torch, DTYPES[kind], N, HEADS, DIM)
        kv.append(0, k, k)
        view = kv.layer(0)[0]
        for given in (view, np.asarray(view), view[:, 1:, ::2], np.asarray(view)[:, 1:, ::2]):
            found = ut.tensor(given)
            assert (found.data_ptr(), tuple(found.shape)) == (given.ctypes.data, given.shape)
            assert found.stride() == tuple(step // given.itemsize for step in given.strides)
            assert found.dtype == k.dtype
        whole = ut.tensor(view)
        kv.clear()
        kv.append(0, -k, -k)  # to the same rows
        assert torch.equal(whole[0].transpose(0, 1), -k)
        del view, given, found
        with pytest.raises(BufferError):
            kv.close()
        with kv:  # the tensor keeps the memory of the closed cache
            pass
        assert torch.equal(whole[0].transpose(0, 1), -k)


def test_other_arrays_are_tensors(torch: Any) -> None:
    array = np.arange(6, dtype=ml_dtypes.bfloat16)
    for given in (array, torch.from_numpy(array.view("u2")).view(torch.bfloat16)):
        assert ut.tensor(given).tolist() == [0, 1, 2, 3, 4, 5]
    assert ut.tensor(array).data_ptr() == array.ctypes.data
    with um.Block(4096) as block:
        assert ut.tensor(block).data_ptr() == block.address
        gc.collect()


def test_other_objects_than_tensors_are_refused(torch: Any) -> None:
    with um.KVCache(1, HEADS, DIM, 8, dtype="q8_0") as kv:
        cases = {
            "blocks of q8_0": kv.layer(0)[0],
            "big-endian": np.zeros(2, ">f4"),
            "backwards": np.zeros(3, "f4")[::-1],
            "text": "text",
            "a list": [1.0],
            "none": None,
        }
        for given in cases.values():
            with pytest.raises(TypeError, match=r"^view: expected an array .*, got "):
                ut.tensor(given)


# ---- weights ----


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[um.Weights]:
    """Tensors of 4-bit numbers; the rows of one are no whole bytes."""
    path = tmp_path / "f4.safetensors"
    path.write_bytes(sf.write({"weight": ("F4", (2, 8)), "odd": ("F4", (2, 3))}))
    with um.open_weights(path) as w:
        yield w


FOUR: dict[str, Any] = {"names": {"weight": "weight"}, "strict": False}


def test_numbers_of_4_bits_are_those_of_torch(
    torch: Any, halves: um.Weights, monkeypatch: Any
) -> None:
    kind, weight = torch.float4_e2m1fn_x2, halves.tensors["weight"]
    found = ut.tensor(weight)
    assert (found.dtype, found.shape, found.data_ptr()) == (kind, (2, 4), weight.address)
    net, odd = torch.nn.Module(), torch.nn.Module()
    for dtype in (kind, torch.uint8, torch.float32):
        empty = torch.empty(2, 4, dtype=dtype, device="meta")
        net.weight = torch.nn.Parameter(empty, requires_grad=False)
        if dtype == torch.float32:
            with pytest.raises(TypeError, match=r"float4_e2m1fn_x2 or torch.uint8 .* torch.float3"):
                ut.load_state_dict(net, halves, **FOUR)
            continue
        for writable in (None, "copy"):
            assert ut.load_state_dict(net, halves, writable=writable, **FOUR) == []
            assert net.weight.dtype == dtype
            assert same_bits(torch, net.weight, weight)
            assert (net.weight.data_ptr() == weight.address) == (writable is None)
    odd.weight = torch.nn.Parameter(torch.empty(2, 3), requires_grad=False)
    for call in (
        lambda: ut.tensor(halves.tensors["odd"]),
        lambda: ut.load_state_dict(odd, halves, names={"weight": "odd"}, strict=False),
    ):
        with pytest.raises(TypeError, match="'odd' in a type that torch has, got f4"):
            call()
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    with pytest.raises(TypeError, match=r"a torch that has float4_e2m1fn_x2 .* as_array\(\)"):
        ut.tensor(weight)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model of two layers: weights in bfloat16, a bias in float32, and an unused bias."""
    shapes: dict[str, tuple[str, sf.Shape]] = {
        "0.bias": ("F32", (4,)),
        "0.weight": ("BF16", (4, 6)),
        "1.weight": ("BF16", (2, 4)),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(sf.write(shapes))
    return path


@pytest.fixture
def weights(path: Path) -> Iterator[um.Weights]:
    with um.open_weights(path) as w:
        yield w


def module(torch: Any, device: str = "cpu") -> Any:
    with torch.device(device):
        layers = torch.nn.Linear(6, 4), torch.nn.Linear(4, 2, bias=False)
        return torch.nn.Sequential(*layers).to(torch.bfloat16)


def same_bits(torch: Any, found: Any, tensor: Any) -> bool:
    bits: bytes = tensor.as_array().tobytes()
    return bytes(found.detach().view(torch.uint8).flatten().tolist()) == bits


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_takes_a_model(torch: Any, weights: um.Weights, device: str) -> None:
    net = module(torch, device)
    assert ut.load_state_dict(net, weights) == ["0.bias"]
    for name in ("0.weight", "1.weight"):
        parameter = net.state_dict()[name]
        assert parameter.data_ptr() == weights.tensors[name].address
        assert same_bits(torch, parameter, weights.tensors[name])
        assert not net.get_parameter(name).requires_grad
    bias = net[0].bias
    assert (bias.dtype, bias.requires_grad, bias.device.type) == (torch.bfloat16, True, "cpu")
    assert torch.equal(bias, ut.tensor(weights.tensors["0.bias"]).to(torch.bfloat16))
    del bias, parameter
    with pytest.raises(BufferError):
        weights.close()
    net[0].weight.sum().item()
    del net
    gc.collect()
    weights.close()


def test_names_that_differ_and_parameters_that_are_shared(torch: Any, weights: um.Weights) -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 6, dtype=torch.bfloat16)
            self.head = torch.nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight

    net = Tied()
    names = {"embed.weight": "0.weight"}
    with pytest.raises(ValueError, match=r"^names: .*2 that the model has and .*: 0.bias, 1.w"):
        ut.load_state_dict(net, weights, names=names)
    assert ut.load_state_dict(net, weights, names=names, strict=False) == []
    assert net.head.weight is net.embed.weight
    assert net.head.weight.data_ptr() == weights.tensors["0.weight"].address


def test_a_tensor_that_does_not_fit_changes_nothing(
    torch: Any, weights: um.Weights, tmp_path: Path
) -> None:
    (tmp_path / "file.gguf").write_bytes(gf.everything())
    with um.open_weights(tmp_path / "file.gguf") as blocks:
        assert blocks.tensors["one"].type == "q8_0"
        linear = torch.nn.Linear(6, 4)
        of_one = {"names": {"weight": "one"}, "strict": False}
        of_0 = {"names": {"weight": "0.weight"}, "strict": False}
        cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
            (module(torch), None, {}, TypeError, "weights: expected what open_weights"),
            ("net", weights, {}, TypeError, "module: expected a torch.nn.Module, got str"),
            (linear, weights, {}, ValueError, "names: .*2 that the module has .*: bias, weight;"),
            (linear, weights, {"names": 3}, TypeError, "names: expected a mapping.*got int"),
            (linear, weights, {"names": {"x": "0.bias"}}, ValueError, "module has not: x; names="),
            (linear, weights, {"names": {"bias": "y"}}, ValueError, "model has not: y; names="),
            (
                torch.nn.Linear(3, 4),
                weights,
                of_0,
                ValueError,
                r"'0.weight' of shape \(4, 3\), as .* 'weight', got \(4, 6\)",
            ),
            (torch.nn.LayerNorm(64), blocks, of_one, TypeError, "'one' in a type .*, got q8_0"),
            (linear, weights, {"strict": "no"}, ValueError, "strict: expected False or True, got"),
        ]
        for net, given, options, error, said in cases:
            before = dict(net.named_parameters()) if isinstance(net, torch.nn.Module) else {}
            with pytest.raises(error, match=said):
                ut.load_state_dict(net, given, **options)
            after = dict(net.named_parameters()) if isinstance(net, torch.nn.Module) else {}
            assert all(after[name] is value for name, value in before.items())


@pytest.mark.parametrize("load", ["map", "copy"])
def test_parameters_that_may_be_written(torch: Any, path: Path, load: Any) -> None:
    """An optimizer and torch's initializers write to pages of the module's own."""
    before = path.read_bytes()
    with um.open_weights(path, load=load) as weights:
        net = module(torch)
        copied = ut.load_state_dict(net, weights, writable="copy")
        assert sorted(copied) == ["0.bias", "0.weight", "1.weight"][: 1 if load == "map" else 3]
        assert all(parameter.requires_grad for parameter in net.parameters())
        for name in ("0.weight", "1.weight"):
            assert same_bits(torch, net.get_parameter(name), weights.tensors[name])
        kept = net[0].weight.detach().clone()
        net(torch.ones(6, dtype=torch.bfloat16)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        assert not torch.equal(net[0].weight, kept)
        torch.nn.init.zeros_(net[1].weight)
        assert net[1].weight.count_nonzero() == 0
        assert torch.equal(ut.tensor(weights.tensors["0.weight"]), kept)
        assert path.read_bytes() == before


def test_parameters_of_one_tensor_have_pages_of_their_own(torch: Any, path: Path) -> None:
    with um.open_weights(path, load="map") as weights:
        net = torch.nn.Sequential(module(torch), module(torch))
        names = {name: name.partition(".")[2] for name in net.state_dict()}
        ut.load_state_dict(net, weights, names=names, strict=False, writable="copy")
        kept = net[1][1].weight.detach().clone()
        torch.nn.init.zeros_(net[0][1].weight)
        assert torch.equal(net[1][1].weight, kept)


def test_a_file_that_was_replaced_is_not_mapped_again(
    torch: Any, path: Path, weights: um.Weights
) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-8] + bytes(8))
    other.replace(path)
    net = module(torch)
    assert "1.weight" in ut.load_state_dict(net, weights, writable="copy")
    assert same_bits(torch, net[1].weight, weights.tensors["1.weight"])


def test_a_step_of_an_optimizer_over_a_file_is_refused(torch: Any, weights: um.Weights) -> None:
    net = module(torch)
    ut.load_state_dict(net, weights)
    step = torch.optim.SGD(net.parameters(), lr=1.0).step
    step()  # without gradients nothing is written
    net.requires_grad_(True)
    net(torch.ones(6, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected parameters that may be written.*writable="):
        step()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    net.double()  # its memory is torch's own now
    net(torch.ones(6, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    with pytest.raises(ValueError, match="writable: expected one of copy, got True"):
        ut.load_state_dict(net, weights, writable=True)  # type: ignore[arg-type]


def test_closed_weights_say_so(torch: Any, path: Path) -> None:
    w = um.open_weights(path)
    tensor = w.tensors["0.weight"]
    w.close()
    with pytest.raises(um.ClosedError):
        ut.tensor(tensor)
    with pytest.raises(um.ClosedError):
        ut.load_state_dict(module(torch), w)
