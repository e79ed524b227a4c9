/* The ledger and the counters: every mapping, heap allocation and system call is counted. */
#ifndef UM_STATS_H
#define UM_STATS_H

#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* Returns zeroed heap memory, or NULL. */
void *um__heap_alloc(size_t n, size_t item_bytes);
void um__heap_free(void *p);

/* Enters a mapping into its category, or strikes it off. */
void um__ledger_enter(um_category category, uint64_t nbytes);
void um__ledger_leave(um_category category, uint64_t nbytes);
/* Changes the size of a mapping that stays. */
void um__ledger_resize(um_category category, uint64_t from_nbytes, uint64_t to_nbytes);
void um__count_os_call(void);

#endif
