/* The steps of a block: a bit for each one that is committed, and for each one that is a file's. */
#ifndef UM_STEPS_H
#define UM_STEPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* Neighbouring steps of a block, by their numbers. */
typedef struct um__run {
    size_t first, end;
} um__run;

size_t um__block_n_steps(const um_block *block);
/* Returns how much is committed now, while another thread may be changing it. */
size_t um__block_committed_nbytes(const um_block *block);
/* Checks that the block has the range, and with `committed` that all of it is committed. *out_end
 * is its end. errors: UM_E_INVALID. */
UM_CHECKED um_status um__block_check_range(const um_block *block, size_t offset, size_t nbytes,
                                           bool committed, size_t *out_end, um_error *err);
/* Finds the first run in [from, end) whose steps are all committed, or all not. Returns false if
 * there is no such run. */
bool um__block_next_run(const um_block *block, size_t from, size_t end, bool committed,
                        um__run *out);
/* Goes through the runs of [from, to). */
#define UM__EACH_RUN(run, block, from, to, committed)                                              \
    for (um__run run = {.end = (from)}; um__block_next_run(block, run.end, to, committed, &run);)
/* Does so for steps that are a file's (um_block_overlay), or not. */
bool um__block_next_overlay(const um_block *block, size_t from, size_t end, bool overlaid,
                            um__run *out);

/* Allocates a bit for each step of the block, none of them set. errors: UM_E_NOMEM. */
UM_CHECKED um_status um__steps_alloc(const um_block *block, uint64_t **out, um_error *err);
/* Sets or clears the bits of a run. */
void um__steps_set(uint64_t *words, um__run run, bool set);

/* A change of the committed steps. Everything that can fail happens in um__steps_begin, before the
 * memory changes. */
typedef struct um__steps_change {
    um__run range;
    uint64_t *words; /* the bits as they are; NULL if the block needs none after the change */
} um__steps_change;

/* Prepares to commit a range, or to release it. errors: UM_E_NOMEM. */
UM_CHECKED um_status um__steps_begin(const um_block *block, um__run range, bool committed,
                                     um__steps_change *out, um_error *err);
/* Drops a change whose memory stayed as it was. */
void um__steps_abandon(const um_block *block, const um__steps_change *change);
/* Records the change in the block and in the ledger. */
void um__steps_finish(um_block *block, const um__steps_change *change, bool committed);

#endif
