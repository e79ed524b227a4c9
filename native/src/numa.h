/* The node of each unit of interleaved memory. */
#ifndef UM_NUMA_H
#define UM_NUMA_H

#include <stdint.h>

#include "unimem.h"

/* As the kernel spreads pages: so many on the first node as its weight says, then on the next one,
 * and from the beginning again. */
typedef struct um_numa_pattern {
    unsigned n_nodes;
    int nodes[UM_MAX_NODES];     /* in ascending order */
    uint32_t ends[UM_MAX_NODES]; /* unit of the cycle behind the last one of each node */
    uint32_t cycle;              /* units until it begins anew; the sum of the weights */
} um_numa_pattern;

/* weights has an entry for each node by its number, at least 1; NULL: all 1. pre: numa has a node.
 */
void um_numa_pattern_make(um_numa_pattern *out, const um_numa *numa, const uint32_t *weights);
/* Index into `nodes` of a unit's node. */
unsigned um_numa_pattern_index(const um_numa_pattern *pattern, uint64_t unit);

#endif
