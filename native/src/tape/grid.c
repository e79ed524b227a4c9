/* Cells of one size. The free list is a stack whose links lie beside the cells: a free cell keeps
 * its contents, and a cell that is given back twice is noticed. Its head has a tag, which changes
 * if a cell was taken and given back meanwhile. */
#include "base/sizes.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { CELL_ALIGN = 64 };
static const uint32_t NO_CELL = UINT32_MAX;
static const uint32_t TAKEN = UINT32_MAX - 1;

static uint64_t make_head(uint64_t old, uint32_t id) {
    return ((old >> 32) + 1) << 32 | id;
}

/* Computes the sizes of the cells and of the links; returns false on overflow. */
static bool grid_sizes(size_t cell_bytes, uint32_t n_cells, size_t *cell, size_t *cells,
                       size_t *links) {
    return cell_bytes != 0 && n_cells != 0 && n_cells < TAKEN &&
           um__round_up(cell_bytes, CELL_ALIGN, cell) && um__mul(*cell, n_cells, cells) &&
           um__mul(sizeof(uint32_t), n_cells, links);
}

um_status um_grid_bytes(size_t cell_bytes, uint32_t n_cells, size_t *out, um_error *err) {
    size_t cell, cells, links, sum;
    UM__INVALID_IF(!grid_sizes(cell_bytes, n_cells, &cell, &cells, &links) ||
                       !um__add(cells, links, &sum) || !um__add(sum, CELL_ALIGN, &sum),
                   err, "cell_bytes or n_cells");
    *out = sum;
    return UM_OK;
}

um_status um_grid_init_apart(um_grid *grid, void *cells, void *links, size_t cell_bytes,
                             uint32_t n_cells, um_error *err) {
    size_t cell, cells_bytes, links_bytes, end;
    UM__INVALID_IF(!grid_sizes(cell_bytes, n_cells, &cell, &cells_bytes, &links_bytes), err,
                   "cell_bytes or n_cells");
    UM__INVALID_IF(cells == NULL || (uintptr_t)cells % CELL_ALIGN != 0 ||
                       !um__add((uintptr_t)cells, cells_bytes, &end),
                   err, "cells");
    UM__INVALID_IF(links == NULL || (uintptr_t)links % _Alignof(uint32_t) != 0, err, "links");
    grid->base = cells;
    grid->cell_bytes = cell;
    grid->n_cells = n_cells;
    grid->next = links;
    for (uint32_t id = 0; id < n_cells; id++) {
        atomic_init(&grid->next[id], id + 1 < n_cells ? id + 1 : NO_CELL);
    }
    atomic_init(&grid->head, 0);
    atomic_init(&grid->n_free, n_cells);
    return UM_OK;
}

um_status um_grid_init(um_grid *grid, um_tape *tape, size_t cell_bytes, uint32_t n_cells,
                       um_error *err) {
    size_t cell, cells, links, sum;
    UM__INVALID_IF(!grid_sizes(cell_bytes, n_cells, &cell, &cells, &links) ||
                       !um__add(cells, links, &sum),
                   err, "cell_bytes or n_cells");
    /* Takes both at once, so that a full tape leaves nothing behind. */
    void *base;
    UM__TRY(um_tape_take(tape, sum, CELL_ALIGN, &base, err));
    return um_grid_init_apart(grid, base, (unsigned char *)base + cells, cell_bytes, n_cells, err);
}

um_status um_grid_take(um_grid *grid, uint32_t *out_id, um_error *err) {
    uint64_t head = atomic_load(&grid->head);
    uint32_t id, next;
    do {
        id = (uint32_t)head;
        UM__RETURN_IF(id == NO_CELL,
                      um__fail_full(err, UM_GRID_FULL, grid->n_cells, grid->n_cells, 1, "grid"));
        /* If another thread takes this very cell now, the tag changes, and the exchange fails. */
        next = atomic_load(&grid->next[id]);
    } while (!atomic_compare_exchange_weak(&grid->head, &head, make_head(head, next)));
    atomic_store(&grid->next[id], TAKEN);
    atomic_fetch_sub(&grid->n_free, 1);
    *out_id = id;
    return UM_OK;
}

um_status um_grid_give(um_grid *grid, uint32_t id, um_error *err) {
    UM__INVALID_IF(id >= grid->n_cells, err, "no such cell");
    uint64_t head = atomic_load(&grid->head);
    uint32_t taken = TAKEN;
    /* If two threads give the same cell, only one passes here. */
    UM__RETURN_IF(
        !atomic_compare_exchange_strong(&grid->next[id], &taken, (uint32_t)head),
        um__fail_detail(err, UM_E_STATE, UM_GRID_FREE, "the cell was given back already"));
    /* Counts the cell before it can be taken, so that the count never falls below 0. */
    atomic_fetch_add(&grid->n_free, 1);
    while (!atomic_compare_exchange_weak(&grid->head, &head, make_head(head, id))) {
        atomic_store(&grid->next[id], (uint32_t)head);
    }
    return UM_OK;
}

void *um_grid_cell(const um_grid *grid, uint32_t id) {
    return id < grid->n_cells ? grid->base + (size_t)id * grid->cell_bytes : NULL;
}

uint32_t um_grid_n_available(const um_grid *grid) {
    return atomic_load(&grid->n_free);
}
