# cython: language_level=3, nonecheck=True
"""Grids: cells of one size that are taken and given back in any order."""
import numpy as np

from unimem.errors import ClosedError, GridFull
from unimem.base.arguments import string

cimport cython
from libc.stdint cimport uint32_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport bytes_of, dtype_of, size_of
from unimem._core.status cimport raise_status
from unimem._core.tape cimport Tape

#: from unimem._core.tape import Bump
#: from unimem.system.placement import PlacementOptions
#: _TapeT = TypeVar("_TapeT", bound=Bump[Any])


cdef class Cell:
    """One cell of a `Grid`, until `Grid.give`. One thread at a time may use it.

    Attributes
    ----------
    id : int
        Its number in the grid.
    """

    cdef Cells taken_from(self):
        if self._grid is None:
            raise ClosedError(f"cell {self.id} was given back")
        return self._grid

    @property
    @cython.critical_section
    def address(self) -> int:
        """Address of its first byte, a multiple of 64."""
        cdef Cells grid = self.taken_from()
        grid.tape.check_open()
        return <uintptr_t>um.um_grid_cell(&grid.grid, self.id)

    @property
    @cython.critical_section
    def nbytes(self) -> int:
        """Its size in bytes, as requested of the grid."""
        return self.taken_from().cell_bytes

    @cython.critical_section
    def as_array(self, dtype: Any = "uint8", shape: int | Sequence[int] | None = None) -> Any:
        """View the cell as an array, without a copy, as `Block.as_array`.

        Parameters
        ----------
        dtype : dtype-like
            A NumPy dtype.
        shape : int or tuple of int, optional
            The whole cell by default.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Invalid after the cell is given back.

        Raises
        ------
        ValueError
            The array does not fit into the cell.
        """
        cdef Cells grid = self.taken_from()
        block = grid.tape.block
        descr = dtype_of(dtype)
        if shape is None:
            shape = grid.cell_bytes // descr.itemsize
        array = block.as_array(descr, shape, self.address - block.address)
        if array.nbytes > grid.cell_bytes:
            raise ValueError(f"shape {array.shape} of {array.dtype} needs {array.nbytes} bytes of "
                             f"a cell of {grid.cell_bytes}")
        return array

    def __reduce__(self):
        raise TypeError("a Cell cannot be pickled or copied: it is memory of this process. "
                        "Save what is in it")

    def __repr__(self):
        return f"Cell({self.id}, {'given back' if self._grid is None else self.nbytes})"


cdef size_t _check_sizes(object cell_bytes, object n_cells, size_t *size) except 0:
    """Return the bytes that cells and links need, and give the size of a cell."""
    cdef um.um_error err
    cdef size_t nbytes
    size[0] = bytes_of(cell_bytes, "cell_bytes", 1)
    if size_of(n_cells, "n_cells", 1) >= 2**32 - 2:
        raise ValueError(f"n_cells: expected at most 2**32 - 3, got {n_cells}")
    if um.um_grid_bytes(size[0], n_cells, &nbytes, &err) != um.UM_OK:
        raise_status(err.status, &err, "Grid")
    return nbytes


#: class Cells(Generic[_TapeT]):
cdef class Cells:
    """A `Grid` over a tape of any memory, which it never touches."""
    #: tape: _TapeT

    cdef object begin(self):
        # A flag, since converting the arguments may call the constructor again.
        if self._begun:
            raise RuntimeError("the Grid is made already")
        self._begun = True

    cdef object check_open(self):
        if self.tape is None:
            raise ClosedError("the Grid was never made: its constructor raised")
        self.tape.check_open()

    cdef object fail(self, um.um_error *err):
        raise_status(err.status, err, f"Grid '{self.tape.name}'", GridFull, "cells")

    cdef void *take_cell(self, uint32_t *out_id) except NULL nogil:
        cdef um.um_error err
        if self.tape is None or not self.tape._open:
            with gil:
                self.check_open()
        if um.um_grid_take(&self.grid, out_id, &err) != um.UM_OK:
            with gil:
                self.fail(&err)
        return um.um_grid_cell(&self.grid, out_id[0])

    cdef int give_cell(self, uint32_t cell_id) except -1 nogil:
        cdef um.um_error err
        if self.tape is None or not self.tape._open:
            with gil:
                self.check_open()
        if um.um_grid_give(&self.grid, cell_id, &err) != um.UM_OK:
            with gil:
                raise ValueError(f"cell_id: expected one that is taken, of {self.grid.n_cells}, "
                                 f"got {cell_id}")
        return 0

    def take(self) -> Cell:
        """Take a cell, which is uninitialised.

        Returns
        -------
        Cell

        Raises
        ------
        GridFull
            No cell is free.
        ClosedError
        """
        cdef um.um_error err
        cdef uint32_t cell_id
        with cython.critical_section(self.tape):  # no thread closes it meanwhile
            if self.tape is None or not self.tape._open:
                self.check_open()
            if um.um_grid_take(&self.grid, &cell_id, &err) != um.UM_OK:
                self.fail(&err)
        cdef Cell cell = Cell.__new__(Cell)
        cell._grid = self
        cell.id = cell_id
        return cell

    def give(self, Cell cell not None) -> None:
        """Give a cell back.

        Raises
        ------
        ValueError
            The cell belongs to another grid.
        ClosedError
            It was given back already.
        """
        cdef um.um_error err
        with cython.critical_section(cell, self.tape):
            if self.tape is None or not self.tape._open:
                self.check_open()
            if cell.taken_from() is not self:
                raise ValueError(f"cell {cell.id} belongs to another grid")
            if um.um_grid_give(&self.grid, cell.id, &err) != um.UM_OK:
                self.fail(&err)
            cell._grid = None

    @property
    def n_available(self) -> int:
        """How many cells are free."""
        return um.um_grid_n_available(&self.grid)

    @property
    def n_cells(self) -> int:
        """How many cells there are."""
        return self.grid.n_cells

    @property
    def closed(self) -> bool:
        """Whether the grid was closed."""
        return self.tape is None or self.tape.closed

    def close(self) -> None:
        """Give the memory back; raises BufferError while arrays use it."""
        if self.tape is not None:
            self.tape.close()

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.tape is not None:
            self.tape.__exit__(*exc_info)

    def __reduce__(self):
        raise TypeError("a Grid cannot be pickled: it is memory of this process. "
                        "Save what is in its cells")

    def __repr__(self):
        if self.closed:
            return f"Grid('{self.tape.name}', closed)" if self.tape is not None else "Grid(closed)"
        return (f"Grid('{self.tape.name}', {self.n_available} of {self.n_cells} cells of "
                f"{self.cell_bytes} bytes free, {self.tape.block.granted})")


#: class Grid(Cells[Tape]):
cdef class Grid(Cells):
    """Cells of one size over a tape, to be taken and given back in any order.

    Any number of threads may take and give at the same time, without a lock. A forked child has its
    own copy.

    Parameters
    ----------
    cell_bytes : int or str
        The size of a cell, in bytes or as ``"64K"``; cells lie at multiples of 64 bytes.
    n_cells : int
        The number of cells, below 2**32 - 2.
    name, category : str
        As for `Tape`.
    **placement
        See `PlacementOptions`.

    Attributes
    ----------
    tape : Tape
        The tape that holds the cells and nothing else.

    Raises
    ------
    ValueError, MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Grid(4096, 8) as grid:
    ...     cell = grid.take()
    ...     cell.as_array("float32", (32, 32)).fill(0)
    ...     grid.give(cell)
    ...     grid.n_available
    8
    """

    def __init__(self, cell_bytes: int | str, n_cells: int, *, name: str | None = None,
                 category: str = "scratch", **placement: Unpack[PlacementOptions]) -> None:
        self.begin()
        cdef um.um_error err
        cdef size_t size, nbytes = _check_sizes(cell_bytes, n_cells, &size)
        cdef Tape tape = Tape(nbytes, name=string(name, "name", "grid"), category=category,
                              **placement)
        self.tape, self.cell_bytes = tape, size
        if um.um_grid_init(&self.grid, &tape.tape, self.cell_bytes, n_cells, &err) != um.UM_OK:
            self.fail(&err)


#: class DeviceGrid(Cells[Any]):
cdef class DeviceGrid(Cells):
    """The half of `cuda.Grid` without a device: its free list is in main memory.

    `new_tape(nbytes)` makes the tape.
    """

    def __init__(self, cell_bytes: int | str, n_cells: int,
                 new_tape: Callable[[int], Bump[Any]]) -> None:
        self.begin()
        cdef um.um_error err
        cdef size_t size
        _check_sizes(cell_bytes, n_cells, &size)
        links = np.empty(n_cells, np.uint32)
        self.tape, self.cell_bytes = new_tape((size + 63) // 64 * 64 * n_cells), size
        cdef uintptr_t first = links.ctypes.data
        if um.um_grid_init_apart(
                &self.grid, self.tape.take_raw(self.tape.total_bytes), <void *>first,
                self.cell_bytes, n_cells, &err) != um.UM_OK:
            self.fail(&err)
        self._links = links
