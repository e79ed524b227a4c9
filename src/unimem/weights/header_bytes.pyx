# cython: language_level=3, boundscheck=False, wraparound=False
"""The first bytes of a model file, for a parser that says how many it needs."""
import hashlib

import numpy as np

from unimem.errors import CapacityError, ClosedError, FormatError
from unimem.weights.names import ByName

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from unimem._core cimport native as um
from unimem._core.region cimport Region
from unimem._core.status cimport raise_file_status, raise_status


cdef class HeaderBytes:
    """The base of the headers of all formats."""

    cdef um.um_status parse(self, size_t nbytes, um.um_error *err) noexcept nogil:
        return um.UM_E_STATE  # only the class of a format has a parser

    cdef uint64_t n_keys(self):
        return 0

    cdef uint64_t n_tensors(self):
        return 0

    cdef tensor_facts facts(self, uint64_t i) noexcept:
        return tensor_facts(NULL, 0, 0, 0, 0, 0)

    cdef str type_name(self, uint32_t type):
        return ""

    cdef object ggml_number(self, uint32_t type):
        return None

    cdef named name_place(self, uint64_t i) noexcept:
        return named(0, 0)

    cdef str text(self, const unsigned char *utf8, uint64_t nbytes):
        return PyUnicode_DecodeUTF8(<const char *>utf8, <Py_ssize_t>nbytes, NULL)

    cdef str name(self, uint64_t i):
        cdef named at
        cdef const uint64_t *ends
        if self._kept is None:
            at = self.name_place(i)
            return self.text(self._bytes + at.offset, at.nbytes)
        ends = <const uint64_t *>PyBytes_AS_STRING(self._kept)
        return self.text(<const unsigned char *>ends + ends[i], ends[i + 1] - ends[i])

    cdef bytes names(self):
        """Copy the names in one piece, behind the end of each in it."""
        cdef uint64_t i, n = self.n_keys() + self.n_tensors(), nbytes = (n + 1) * sizeof(uint64_t)
        cdef uint64_t *ends
        cdef named at
        for i in range(n):
            nbytes += self.name_place(i).nbytes
        kept = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>nbytes)
        ends = <uint64_t *>PyBytes_AS_STRING(kept)
        ends[0] = (n + 1) * sizeof(uint64_t)
        for i in range(n):
            at = self.name_place(i)
            memcpy(<unsigned char *>ends + ends[i], self._bytes + at.offset, at.nbytes)
            ends[i + 1] = ends[i] + at.nbytes
        return kept

    cdef int read(self, source, str path, uint64_t first_nbytes, type format) except -1:
        cdef um.um_error err
        cdef um.um_status status = um.UM_OK
        cdef uint64_t nbytes = min(self._file_nbytes, first_nbytes)
        cdef um.um_block_options options
        memset(&options, 0, sizeof(options))
        while True:
            if nbytes > 0:
                self._region = Region.__new__(Region)
                self._region.name = path
                with nogil:
                    status = um.um_block_map(&self._region.block, nbytes, &options, &err)
                if status != um.UM_OK:
                    raise_status(status, &err, path)
                self._region.enter()
                self._bytes = <const unsigned char *>self._region.block.base
                self.fetch(source, path, nbytes)
            with nogil:
                status = self.parse(nbytes, &err)
            if status == um.UM_OK:
                if nbytes > first_nbytes:
                    self.give_back_behind(self.nbytes)
                return 0
            if status != um.UM_E_FULL:
                try:
                    raise_status(status, &err, path, CapacityError, "bytes", format)
                except FormatError as error:
                    at = None if error.offset is None else self._begin + error.offset
                    raise format(error.rule, at, path) from None
            nbytes = err.asked

    cdef int fetch(self, source, str path, uint64_t nbytes) except -1:
        """Copy the first bytes of a file, or of a buffer, into the region."""
        cdef um.um_error err
        cdef um.um_status status
        cdef Py_buffer view
        cdef int fd
        if isinstance(source, memoryview):
            PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
            memcpy(self._region.block.base, <char *>view.buf + self._begin, nbytes)
            PyBuffer_Release(&view)
            return 0
        fd = source
        with nogil:
            status = um.um_file_read(fd, self._begin, self._region.block.base, nbytes, &err)
        if status != um.UM_OK:
            raise_file_status(status, &err, "reading the header", path)
        return 0

    cdef void give_back_behind(self, size_t end) noexcept:
        # Later reads take large steps, and the header may end early in the last. Memory that the
        # kernel does not take back stays in the ledger.
        cdef um.um_block *block = &self._region.block
        cdef um.um_status _status = um.um_block_release(block, end, block.nbytes - end, NULL, NULL)

    @cython.critical_section
    cdef Region opened(self):
        if self._region is None:
            raise ClosedError("the Weights were closed, and their header with them")
        return self._region

    @property
    @cython.critical_section
    def address(self) -> int:
        """The address of the private copy; 0 without one."""
        return 0 if self._region is None else <uintptr_t>self._region.block.base

    @property
    @cython.critical_section
    def copied_bytes(self) -> int:
        """Bytes of the private copy; 0 without one."""
        return 0 if self._region is None else self._region.memory_bytes()

    @cython.critical_section
    def close(self) -> None:
        """Free the copy with metadata and fingerprint; names and the table stay. Twice is fine."""
        if self._kept is None:
            self._kept = self.names()
        self._region = None

    def fingerprint(self) -> str:
        """Return a hash of the header and the size of the file, in hexadecimal."""
        digest = hashlib.blake2b(memoryview(self.opened())[:self.nbytes], digest_size=16)
        digest.update(int(self._file_nbytes).to_bytes(8, "little"))
        return digest.hexdigest()

    @cython.critical_section
    def key_at(self, uint64_t i) -> str:
        """Return a key of the metadata by its index, also after `close`."""
        if i >= self.n_keys():
            raise IndexError(i)
        return self.name(i)

    @cython.critical_section
    def name_at(self, uint64_t i) -> str:
        """Return the name of a tensor by its index, also after `close`."""
        if i >= self.n_tensors():
            raise IndexError(i)
        return self.name(self.n_keys() + i)

    def keys(self) -> ByName[int]:
        """Return the keys of the metadata with their indices, in the order of the file."""
        return ByName(self.n_keys(), self.key_at, index_of)

    def tensor_names(self) -> ByName[int]:
        """Return the names of the tensors with their indices, in the order of the file."""
        return ByName(self.n_tensors(), self.name_at, index_of)

    def tensor(self, Py_ssize_t index) -> tuple[tuple[int, ...], str, int | None, int, int]:
        """Return ne (ggml's order), type, ggml's number of it or None, offset and bytes.

        The bytes of a type that GGUF does not know are those up to the next tensor, or to the end
        of the file. The data of safetensors may begin at any byte, even if the dtype needs
        alignment.
        """
        cdef tensor_facts facts
        cdef Py_ssize_t i
        if not 0 <= index < <Py_ssize_t>self.n_tensors():
            raise IndexError(f"tensor {index} of {self.n_tensors()}")
        facts = self.facts(index)
        ne = tuple([facts.dims[i * facts.step] for i in range(facts.n_dims - 1, -1, -1)])
        number = self.ggml_number(facts.type)
        return ne, self.type_name(facts.type), number, self._begin + facts.offset, facts.nbytes

    @property
    def data_end(self) -> int:
        """The end of the last tensor in the file; 0 without tensors."""
        cdef uint64_t i, end = 0
        for i in range(self.n_tensors()):
            end = max(end, self._begin + self.facts(i).offset + self.facts(i).nbytes)
        return end

    def by_type(self) -> dict[str, tuple[int, int, int]]:
        """Return the number of tensors of each type, their bytes, and their values, by name."""
        cdef tensor_facts facts
        cdef uint64_t i, values
        cdef Py_ssize_t dim
        cdef dict totals = {}
        for i in range(self.n_tensors()):
            facts = self.facts(i)
            values = 1
            for dim in range(facts.n_dims):
                values *= facts.dims[dim * facts.step]  # may overflow only where one is 0
            n, nbytes, n_values = totals.get(facts.type, (0, 0, 0))
            totals[facts.type] = n + 1, nbytes + facts.nbytes, n_values + values
        return {self.type_name(kind): total for kind, total in totals.items()}

    def runs(self) -> Iterator[tuple[int, int, str]]:
        """Yield offset in the file, bytes and type of each run of adjacent tensors of one type."""
        cdef tensor_facts facts, run = tensor_facts(NULL, 0, 0, 0, 0, 0)
        cdef uint64_t i
        cdef uint64_t[::1] offsets = np.empty(self.n_tensors(), np.uint64)
        cdef const int64_t[::1] order
        for i in range(self.n_tensors()):
            offsets[i] = self.facts(i).offset
        order = np.argsort(offsets, kind="stable")
        for i in range(self.n_tensors()):
            facts = self.facts(order[i])
            if facts.nbytes == 0:
                continue
            if facts.type != run.type or facts.offset != run.offset + run.nbytes:
                if run.nbytes:
                    yield self._begin + run.offset, run.nbytes, self.type_name(run.type)
                run = facts
            else:
                run.nbytes += facts.nbytes
        if run.nbytes:
            yield self._begin + run.offset, run.nbytes, self.type_name(run.type)


def index_of(index: int, name: str) -> int:
    """Return the index."""
    return index
