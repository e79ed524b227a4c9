/* The index of the table: records in the order of their addresses, as a treap. A number is that of
 * a record, and one; 0 is none. A record keeps its address and size while it is in the index. */
#include "exec.h"

#include <sys/mman.h>

typedef struct node {
    uint32_t left, right;
} node;

static node *nodes;
static const um__record *records;
static uint32_t root;

bool um__index_init(const um__record *of) {
    size_t nbytes = (UM__MOST_RECORDS + 1) * sizeof(node);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    nodes = um__sys_map(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    records = of;
    return nodes != NULL;
}

/* Mixes the number: whatever order records come in, the tree is that of a random one. */
static uint32_t rank_of(uint32_t number) {
    number = (number ^ number >> 16) * 0x7feb352dU;
    number = (number ^ number >> 15) * 0x846ca68bU;
    return number ^ number >> 16;
}

static bool is_before(uint32_t a, uint32_t b) {
    uint64_t first = records[a - 1].address, second = records[b - 1].address;
    return first != second ? first < second : a < b;
}

/* Returns where the tree names a record, or the first place of a lower rank on the way. */
static uint32_t *place_of(uint32_t number) {
    uint32_t *at = &root, rank = rank_of(number);
    while (*at != 0 && *at != number && rank_of(*at) > rank) {
        at = is_before(*at, number) ? &nodes[*at].right : &nodes[*at].left;
    }
    return at;
}

void um__index_add(uint32_t number) {
    uint32_t *at = place_of(number), rest = *at;
    uint32_t *left = &nodes[number].left, *right = &nodes[number].right;
    *at = number;
    while (rest != 0) { /* what lies before the record, and what behind it */
        uint32_t **side = is_before(rest, number) ? &left : &right;
        **side = rest;
        *side = side == &left ? &nodes[rest].right : &nodes[rest].left;
        rest = **side;
    }
    *left = *right = 0;
}

void um__index_remove(uint32_t number) {
    uint32_t *at = place_of(number);
    uint32_t left = nodes[number].left, right = nodes[number].right;
    while (left != 0 && right != 0) {
        bool is_left = rank_of(left) > rank_of(right);
        *at = is_left ? left : right;
        at = is_left ? &nodes[left].right : &nodes[right].left;
        *(is_left ? &left : &right) = *at;
    }
    *at = left != 0 ? left : right;
}

uint32_t um__index_first(uintptr_t address) {
    uint32_t found = 0;
    for (uint32_t at = root; at != 0;) {
        bool ends_behind = records[at - 1].address + records[at - 1].nbytes > address;
        found = ends_behind ? at : found;
        at = ends_behind ? nodes[at].left : nodes[at].right;
    }
    return found;
}

unsigned um__index_depth(uint32_t number) {
    unsigned depth = 0;
    for (uint32_t at = root; at != 0 && at != number; depth++) {
        at = is_before(at, number) ? nodes[at].right : nodes[at].left;
    }
    return depth;
}
