/* An io_uring by plain system calls.
 *
 *     asked:  | read | read | ....  |     we write at the tail, the kernel takes from the head
 *     ended:  | id, result | ....   |     the kernel writes at the tail, we take from the head */
#include "os/ring.h"

#include "os/os.h"

#include <errno.h>

#include "os/kernel.h"

/* The kernel writes these words at any time. */
static uint32_t read_word(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void write_word(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static uint32_t *word_at(const um__ring *ring, uint32_t offset) {
    return (uint32_t *)(void *)(ring->rings + offset);
}

/* Nobody could try later what fails, so it is tried again. */
static void unmap(void *mapped, size_t nbytes) {
    if (um__os_unmap(mapped, nbytes) != 0) {
        um__os_unmap(mapped, nbytes);
    }
}

/* Maps, for this process and not for forked children. */
static int map(int fd, uint64_t offset, size_t nbytes, void **out) {
    void *mapped;
    int os_errno = um__os_ring_map(fd, offset, nbytes, &mapped);
    if (os_errno != 0) {
        return os_errno;
    }
    os_errno = um__os_advise(mapped, nbytes, UM__OS_DONT_FORK);
    if (os_errno != 0) {
        um__os_unmap(mapped, nbytes);
        return os_errno;
    }
    *out = mapped;
    return 0;
}

static int map_rings(um__ring *ring, const um__ring_params *params) {
    size_t asked = params->asked.array_or_flags + params->n_asked * sizeof(uint32_t);
    size_t ended = params->ended.dropped_or_events + params->n_ended * sizeof(um__ring_event);
    void *rings, *entries;
    ring->rings_nbytes = asked > ended ? asked : ended;
    ring->entries_nbytes = params->n_asked * sizeof(um__ring_entry);
    int os_errno = map(ring->fd, 0, ring->rings_nbytes, &rings);
    if (os_errno != 0) {
        return os_errno;
    }
    os_errno = map(ring->fd, UM__RING_OFFSET_ENTRIES, ring->entries_nbytes, &entries);
    if (os_errno != 0) {
        um__os_unmap(rings, ring->rings_nbytes);
        return os_errno;
    }
    ring->rings = rings;
    ring->entries = entries;
    return 0;
}

int um__ring_open(um__ring *out, uint32_t n_reads) {
    um__ring_params params = {0};
    um__ring ring = {0};
    int os_errno = um__os_ring_setup(n_reads, &params, &ring.fd);
    if (os_errno != 0) {
        return os_errno;
    }
    uint32_t needed = UM__RING_ONE_MAPPING | UM__RING_HAS_READ;
    os_errno = (params.features & needed) != needed ? ENOSYS : map_rings(&ring, &params);
    if (os_errno != 0) {
        um__os_close(ring.fd);
        return os_errno;
    }
    ring.asked_head = word_at(&ring, params.asked.head);
    ring.asked_tail = word_at(&ring, params.asked.tail);
    ring.asked_mask = *word_at(&ring, params.asked.mask);
    ring.ended_head = word_at(&ring, params.ended.head);
    ring.ended_tail = word_at(&ring, params.ended.tail);
    ring.ended_mask = *word_at(&ring, params.ended.mask);
    ring.ended = (um__ring_event *)(void *)(ring.rings + params.ended.dropped_or_events);
    uint32_t *order = word_at(&ring, params.asked.array_or_flags);
    for (uint32_t i = 0; i < params.n_asked; i++) {
        order[i] = i;
    }
    *out = ring;
    return 0;
}

void um__ring_put(um__ring *ring, uint32_t id, int fd, void *to, size_t nbytes, uint64_t offset) {
    uint32_t tail = *ring->asked_tail;
    ring->entries[tail & ring->asked_mask] = (um__ring_entry){.opcode = UM__RING_OP_READ,
                                                              .fd = fd,
                                                              .offset = offset,
                                                              .address = (uintptr_t)to,
                                                              .nbytes = (uint32_t)nbytes,
                                                              .id = id};
    write_word(ring->asked_tail, tail + 1);
}

int um__ring_enter(um__ring *ring, unsigned n_least) {
    uint32_t n = read_word(ring->asked_tail) - read_word(ring->asked_head);
    return n == 0 && n_least == 0 ? 0 : um__os_ring_enter(ring->fd, n, n_least);
}

bool um__ring_take(um__ring *ring, um__read_end *out) {
    uint32_t head = *ring->ended_head;
    if (head == read_word(ring->ended_tail)) {
        return false;
    }
    const um__ring_event *event = &ring->ended[head & ring->ended_mask];
    *out = (um__read_end){.id = (uint32_t)event->id,
                          .os_errno = event->result < 0 ? -event->result : 0,
                          .nbytes = event->result < 0 ? 0 : (size_t)event->result};
    write_word(ring->ended_head, head + 1);
    return true;
}

void um__ring_close(um__ring *ring, bool in_child) {
    if (!in_child) {
        unmap(ring->entries, ring->entries_nbytes);
        unmap(ring->rings, ring->rings_nbytes);
    }
    um__os_close(ring->fd);
}
