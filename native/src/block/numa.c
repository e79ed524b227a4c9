/* NUMA: moving pages that are on other nodes than the policy of their block wants. */
#include "block/numa.h"

#include "base/stats.h"
#include "base/status.h"
#include "block/mirror.h"
#include "os/os.h"
#include "os/proc_file.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Addresses in one call of move_pages; rounds of moving; and immovable pages in a row before the
 * rest is given up. */
enum { BATCH = 4096, MAX_ROUNDS = 4, MAX_STUCK = 256 };

/* The status of a page that the kernel has not come to. */
enum { NOT_TRIED = INT32_MIN };

static bool has_node(const um_numa *numa, unsigned node) {
    return (numa->nodes[node / 64] >> (node % 64) & 1) != 0;
}

void um__numa_pattern_make(um__numa_pattern *out, const um_numa *numa, const uint32_t *weights) {
    out->n_nodes = 0;
    out->cycle = 0;
    for (unsigned node = 0; node < UM_MAX_NODES; node++) {
        if (has_node(numa, node)) {
            out->cycle += weights == NULL ? 1 : weights[node];
            out->nodes[out->n_nodes] = (int)node;
            out->ends[out->n_nodes++] = out->cycle;
        }
    }
}

unsigned um__numa_pattern_index(const um__numa_pattern *pattern, uint64_t unit) {
    uint32_t at = (uint32_t)(unit % pattern->cycle);
    unsigned low = 0, high = pattern->n_nodes - 1;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (at < pattern->ends[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* One repair. Pages are moved in batches; after each round the kernel is asked where they are. */
typedef struct repair {
    const um_block *block;
    size_t page;    /* one address is asked about for each page of this size */
    size_t unit;    /* memory that belongs on one node: a page, huge or not */
    bool spread;    /* interleaved: each unit has its node; else any of the nodes will do */
    uint64_t phase; /* the place in the pattern where the block begins */
    um__numa_pattern pattern;
    bool full[UM_MAX_NODES]; /* nodes that had no room */
    unsigned n_stuck;        /* immovable pages since one was moved */

    size_t at; /* the place in the block where the next batch begins */
    size_t n;
    void *pages[BATCH];
    int status[BATCH];

    size_t n_moves;
    void *move_pages[BATCH];
    int move_nodes[BATCH], move_status[BATCH];
} repair;

static bool next_batch(repair *r) {
    const um_block *block = r->block;
    r->n = 0;
    while (r->n < BATCH && r->at < block->reserved_nbytes) {
        /* Only the first image of each piece of mirrored memory counts. */
        if (block->mirror_nbytes != 0) {
            um__piece piece = um__mirror_piece(block, r->at);
            if (r->at >= piece.start + piece.nbytes) {
                r->at = um__mirror_next(&piece);
                continue;
            }
        }
        /* All of a file is committed, the end of its last page too. */
        if (!block->is_file && r->at % block->step_nbytes == 0 &&
            !um_block_is_committed(block, r->at, block->step_nbytes)) {
            r->at += block->step_nbytes;
            continue;
        }
        r->pages[r->n++] = (char *)block->base + r->at;
        r->at += r->page;
    }
    return r->n > 0;
}

static uint64_t unit_of(const repair *r, const void *page) {
    size_t offset = (size_t)((const char *)page - (const char *)r->block->base);
    return um__block_file_offset(r->block, offset) / r->unit;
}

/* Returns whether a page lies on a node that it may lie on. *out_node is the node that it should
 * lie on. */
static bool is_placed(const repair *r, const void *page, int node, int *out_node) {
    uint64_t unit = unit_of(r, page) + r->phase;
    *out_node = r->pattern.nodes[um__numa_pattern_index(&r->pattern, unit)];
    return r->spread ? node == *out_node : has_node(&r->block->numa, (unsigned)node);
}

/* ---- the phase of an interleaved block ---- */

/* Returns the index of a node in the pattern; n_nodes if it is not there. */
static unsigned index_of(const um__numa_pattern *pattern, int node) {
    unsigned i = 0;
    while (i < pattern->n_nodes && pattern->nodes[i] != node) {
        i++;
    }
    return i;
}

/* Finds the phase of an interleaved block: the node that the kernel began with depends on the
 * address, or on the inode of a shared file. Each resident page votes for the phases with which it
 * is on its node, so that what the kernel has spread stays. These phases are an interval of the
 * cycle: only its borders are counted. */
static um_status find_phase(repair *r, int64_t *borders, bool *out_unanimous, um_error *err) {
    const um__numa_pattern *pattern = &r->pattern;
    uint32_t cycle = pattern->cycle;
    int64_t n_pages = 0;
    memset(borders, 0, (cycle + (size_t)1) * sizeof *borders);
    for (r->at = 0; next_batch(r);) {
        UM__TRY_OS(um__os_move_pages(r->n, r->pages, NULL, r->status), err, 0, "move_pages");
        for (size_t i = 0; i < r->n; i++) {
            if (r->status[i] < 0) {
                continue; /* never touched, or not there any more */
            }
            n_pages++;
            unsigned index = index_of(pattern, r->status[i]);
            if (index < pattern->n_nodes) {
                uint32_t begin = index == 0 ? 0 : pattern->ends[index - 1];
                uint32_t weight = pattern->ends[index] - begin;
                uint32_t from =
                    (begin + cycle - (uint32_t)(unit_of(r, r->pages[i]) % cycle)) % cycle;
                borders[from]++;
                borders[from + weight <= cycle ? from + weight : from + weight - cycle]--;
                borders[0] += from + weight > cycle;
            }
        }
    }
    int64_t votes = 0, most = -1;
    for (uint32_t phase = 0; phase < cycle; phase++) {
        votes += borders[phase];
        if (votes > most) {
            most = votes;
            r->phase = phase;
        }
    }
    *out_unanimous = most == n_pages;
    return UM_OK;
}

/* ---- moving ---- */

/* Asks where the pages of the batch are, and lists those that have to move; with `heads`, only the
 * first of each unit, which moves a whole huge page. *out_elsewhere counts all pages. Returns 0 or
 * an errno. */
static int list_moves(repair *r, bool heads, size_t *out_elsewhere) {
    int os_errno = um__os_move_pages(r->n, r->pages, NULL, r->status);
    UM__RETURN_IF(os_errno != 0, os_errno);
    uint64_t last_unit = UINT64_MAX;
    r->n_moves = 0;
    *out_elsewhere = 0;
    for (size_t i = 0; i < r->n; i++) {
        int node;
        if (r->status[i] < 0 || is_placed(r, r->pages[i], r->status[i], &node)) {
            continue;
        }
        ++*out_elsewhere;
        uint64_t unit = unit_of(r, r->pages[i]);
        if (!r->full[node] && !(heads && unit == last_unit)) {
            r->move_pages[r->n_moves] = r->pages[i];
            r->move_nodes[r->n_moves++] = node;
        }
        last_unit = unit;
    }
    return 0;
}

/* Finds the page of [first, n_moves) at which the kernel gave up: it was not moved, and has no
 * errno of its own; *out is n_moves if there is no such page. Returns 0 or an errno. */
static int find_stuck(repair *r, size_t first, size_t *out) {
    size_t n = r->n_moves - first;
    int os_errno = um__os_move_pages(n, r->move_pages + first, NULL, r->status);
    UM__RETURN_IF(os_errno != 0, os_errno);
    size_t i = 0;
    while (i < n && (r->status[i] == r->move_nodes[first + i] || r->status[i] < 0 ||
                     r->move_status[first + i] != NOT_TRIED)) {
        i++;
    }
    r->n_stuck = i > 0 ? 0 : r->n_stuck;
    *out = first + i;
    return 0;
}

/* Moves the listed pages. The kernel stops at a page that it cannot move, such as one that a device
 * reads, and at a node without room: the rest is then asked for again. Pages that other processes
 * map, too, stay: MPOL_MF_MOVE_ALL needs a capability, and would move what those processes placed.
 * Returns 0 or an errno. */
static int run_moves(repair *r, bool *out_again) {
    *out_again = false;
    for (size_t first = 0; first < r->n_moves && r->n_stuck < MAX_STUCK;) {
        for (size_t i = first; i < r->n_moves; i++) {
            r->move_status[i] = NOT_TRIED;
        }
        int os_errno = um__os_move_pages(r->n_moves - first, r->move_pages + first,
                                         r->move_nodes + first, r->move_status + first);
        UM__RETURN_IF(os_errno != 0 && os_errno != ENOMEM, os_errno);
        size_t n_not_tried = 0;
        for (size_t i = first; i < r->n_moves; i++) {
            n_not_tried += r->move_status[i] == NOT_TRIED;
            *out_again = *out_again || r->move_status[i] == -EBUSY || r->move_status[i] == -EAGAIN;
        }
        if (n_not_tried == 0) {
            break;
        }
        size_t stuck;
        int query_errno = find_stuck(r, first, &stuck);
        UM__RETURN_IF(query_errno != 0, query_errno);
        if (stuck == r->n_moves) {
            break;
        }
        *out_again = true;
        r->n_stuck++;
        r->full[r->move_nodes[stuck]] = os_errno == ENOMEM;
        uint64_t unit = unit_of(r, r->move_pages[stuck]);
        for (first = stuck; first < r->n_moves && (unit_of(r, r->move_pages[first]) == unit ||
                                                   r->full[r->move_nodes[first]]);) {
            first++;
        }
    }
    return 0;
}

static um_status repair_batch(repair *r, uint64_t *elsewhere_nbytes, um_error *err) {
    size_t n_elsewhere = 0;
    bool heads = r->unit > r->page, again = true;
    for (int round = 0;; round++) {
        int os_errno = list_moves(r, heads, &n_elsewhere);
        if (os_errno == 0 && n_elsewhere > 0 && again && round < MAX_ROUNDS) {
            os_errno = run_moves(r, &again);
            again = again || heads;
            heads = false;
        } else if (os_errno == 0) {
            *elsewhere_nbytes += n_elsewhere * r->page;
            return UM_OK;
        }
        UM__RETURN_IF(os_errno != 0, um__fail_os(err, os_errno, 0, "move_pages"));
    }
}

/* ---- the policy ---- */

/* Reads the kernel's weight of a node; 1 if it has none. Returns 0 or an errno. */
static int read_weight(unsigned node, uint32_t *out) {
    char path[80], text[32];
    snprintf(path, sizeof path, "/sys/kernel/mm/mempolicy/weighted_interleave/node%u", node);
    int os_errno = um__proc_text(path, text, sizeof text);
    if (os_errno == 0 || os_errno == ENOENT) {
        unsigned long weight = strtoul(text, NULL, 10);
        *out = weight >= 1 && weight <= UINT8_MAX ? (uint32_t)weight : 1;
        return 0;
    }
    return os_errno;
}

static um_status make_pattern(um__numa_pattern *out, const um_numa *numa, um_error *err) {
    uint32_t weights[UM_MAX_NODES] = {0};
    for (unsigned node = 0; numa->mode == UM_NUMA_WEIGHTED && node < UM_MAX_NODES; node++) {
        UM__TRY_OS(has_node(numa, node) ? read_weight(node, &weights[node]) : 0, err, 0,
                   "open or read of weighted_interleave/node");
    }
    um__numa_pattern_make(out, numa, numa->mode == UM_NUMA_WEIGHTED ? weights : NULL);
    return UM_OK;
}

/* Finds the phase of an interleaved block. *out_unanimous: every page is where it belongs. */
static um_status find_spread(repair *r, const um_placement *placement, bool *out_unanimous,
                             um_error *err) {
    int64_t *borders = um__heap_alloc(r->pattern.cycle + (size_t)1, sizeof *borders);
    UM__RETURN_IF(borders == NULL, um__fail_os(err, ENOMEM, 0, "calloc"));
    um_status status = UM_OK;
    *out_unanimous = false;
    /* Where the kernel had no huge page, it has spread small ones. That is as good. */
    size_t unit = r->unit;
    if (placement->huge_bytes == 0 && unit > r->page) {
        r->unit = r->page;
        status = find_phase(r, borders, out_unanimous, err);
        r->unit = unit;
    }
    if (status == UM_OK && !*out_unanimous) {
        status = find_phase(r, borders, out_unanimous, err);
    }
    um__heap_free(borders);
    return status;
}

static um_status run_repair(repair *r, const um_placement *placement, uint64_t *out_nbytes,
                            um_error *err) {
    *out_nbytes = 0;
    if (r->spread) {
        bool unanimous;
        UM__TRY(find_spread(r, placement, &unanimous, err));
        if (unanimous) {
            return UM_OK;
        }
    }
    for (r->at = 0; next_batch(r);) {
        UM__TRY(repair_batch(r, out_nbytes, err));
    }
    return UM_OK;
}

/* Repairs mirrored memory with one image mapped: the kernel moves no page that is mapped twice. */
static um_status repair_folded(repair *r, const um_placement *placement, uint64_t *out_nbytes,
                               um_error *err) {
    if (r->block->mirror_nbytes == 0) {
        return run_repair(r, placement, out_nbytes, err);
    }
    const char *call;
    int os_errno = um__mirror_fold(r->block, &call);
    um_status status = os_errno == 0 ? run_repair(r, placement, out_nbytes, err)
                                     : um__fail_os(err, os_errno, 0, call);
    os_errno = um__mirror_unfold(r->block, &call);
    return status != UM_OK || os_errno == 0 ? status : um__fail_os(err, os_errno, 0, call);
}

um_status um_block_repair(um_block *block, uint64_t *out_nbytes, um_error *err) {
    UM__INVALID_IF(block->numa.mode == UM_NUMA_NONE, err, "the block has no NUMA policy");
    um_placement placement;
    UM__TRY(um_block_verify(block, &placement, err));
    repair *r = um__heap_alloc(1, sizeof *r);
    UM__RETURN_IF(r == NULL, um__fail_os(err, ENOMEM, sizeof *r, "calloc"));
    bool hugetlb = placement.pages == UM_PAGES_2M || placement.pages == UM_PAGES_1G;
    r->block = block;
    r->page = hugetlb ? (size_t)placement.page_bytes : um__os_page_bytes();
    /* The page cache has pieces of up to a huge page of a file, which move whole. */
    size_t step = block->is_file ? um_huge_page_bytes() : block->step_nbytes;
    r->unit = step > r->page ? step : r->page;
    um_status status = make_pattern(&r->pattern, &block->numa, err);
    if (status == UM_OK) {
        uint64_t stray_nbytes = 0, elsewhere_nbytes = 0;
        for (unsigned node = 0; node < UM_MAX_NODES; node++) {
            stray_nbytes += has_node(&block->numa, node) ? 0 : placement.node_bytes[node];
        }
        r->spread = r->pattern.n_nodes > 1 && (block->numa.mode == UM_NUMA_INTERLEAVE ||
                                               block->numa.mode == UM_NUMA_WEIGHTED);
        /* If any of the nodes will do, the kernel's sums say whether anything has to move. */
        if (r->spread || stray_nbytes > 0) {
            status = repair_folded(r, &placement, &elsewhere_nbytes, err);
        }
        if (status == UM_OK && out_nbytes != NULL) {
            *out_nbytes = elsewhere_nbytes;
        }
    }
    um__heap_free(r);
    return status;
}
