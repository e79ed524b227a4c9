/* The node of each unit of interleaved memory. */
#ifndef UM_NUMA_H
#define UM_NUMA_H

#include <stdint.h>

#include "unimem.h"

/* How the kernel spreads pages: as many on each node as its weight says, one node after the other,
 * and again from the first. */
typedef struct um__numa_pattern {
    unsigned n_nodes;
    int nodes[UM_MAX_NODES];     /* in ascending order */
    uint32_t ends[UM_MAX_NODES]; /* the unit of the cycle behind the last one of each node */
    uint32_t cycle;              /* units until the pattern repeats: the sum of the weights */
} um__numa_pattern;

/* Makes the pattern of a policy. weights has an entry of at least 1 for each node, by its number,
 * or is NULL: then all are 1. pre: numa has a node. */
void um__numa_pattern_make(um__numa_pattern *out, const um_numa *numa, const uint32_t *weights);
/* Returns the index in `nodes` of a unit's node. */
unsigned um__numa_pattern_index(const um__numa_pattern *pattern, uint64_t unit);

#endif
