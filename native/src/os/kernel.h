/* Numbers and structs of the kernel (uapi) that the headers of a C library may lack, which may be
 * older than the kernel. Include it behind the system's headers. */
#ifndef UM_KERNEL_H
#define UM_KERNEL_H

#include <stdint.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_DONTNEED_LOCKED /* Linux 5.18 */
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif
#ifndef MAP_FIXED_NOREPLACE /* Linux 4.17 */
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif
#ifndef MREMAP_DONTUNMAP /* Linux 5.7 */
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif
#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef F_SEAL_FUTURE_WRITE /* Linux 5.1 */
#define F_SEAL_FUTURE_WRITE 0x10
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif
#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

enum {
    UM__MPOL_PREFERRED = 1,
    UM__MPOL_BIND = 2,
    UM__MPOL_INTERLEAVE = 3,
    UM__MPOL_PREFERRED_MANY = 5,      /* Linux 5.15 */
    UM__MPOL_WEIGHTED_INTERLEAVE = 6, /* Linux 6.9 */
    UM__MPOL_MF_MOVE = 1 << 1
};

/* Newer calls have the same number on every architecture. */
enum { UM__SYS_FSOPEN = 430, UM__SYS_FSCONFIG = 431, UM__SYS_FSMOUNT = 432, UM__SYS_FSPICK = 433 };
enum { UM__FSOPEN_CLOEXEC = 1, UM__FSMOUNT_CLOEXEC = 1 };
enum { UM__FSPICK_CLOEXEC = 1, UM__FSPICK_EMPTY_PATH = 8 };
enum { UM__FSCONFIG_SET_FLAG = 0, UM__FSCONFIG_SET_STRING = 1 };
enum { UM__FSCONFIG_CMD_CREATE = 6, UM__FSCONFIG_CMD_RECONFIGURE = 7 };
enum { UM__MOUNT_ATTR_NOSUID = 2, UM__MOUNT_ATTR_NODEV = 4, UM__MOUNT_ATTR_NOEXEC = 8 };

/* io_uring, Linux 5.1; reads into plain memory, 5.6. */
enum { UM__SYS_RING_SETUP = 425, UM__SYS_RING_ENTER = 426 };
typedef struct um__ring_offsets { /* struct io_sqring_offsets and io_cqring_offsets */
    uint32_t head, tail, mask, entries;
    uint32_t flags_or_overflow, dropped_or_events, array_or_flags, reserved;
    uint64_t address;
} um__ring_offsets;
typedef struct um__ring_params { /* struct io_uring_params */
    uint32_t n_asked, n_ended, flags, thread_cpu, thread_idle, features, wq_fd, reserved[3];
    um__ring_offsets asked, ended;
} um__ring_params;
typedef struct um__ring_entry { /* struct io_uring_sqe */
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t nbytes, read_flags;
    uint64_t id, rest[3];
} um__ring_entry;
typedef struct um__ring_event { /* struct io_uring_cqe */
    uint64_t id;
    int32_t result;
    uint32_t flags;
} um__ring_event;
enum { UM__RING_OP_READ = 22 };
enum { UM__RING_ENTER_WAIT = 1 };
enum { UM__RING_ONE_MAPPING = 1, UM__RING_HAS_READ = 8 }; /* features; the second came with reads */
#define UM__RING_OFFSET_ENTRIES UINT64_C(0x10000000)

/* PAGEMAP_SCAN, Linux 6.7. */
typedef struct um__scan_arguments { /* struct pm_scan_arg */
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} um__scan_arguments;
typedef struct um__page_run { /* struct page_region: neighbouring pages, mapped by this process */
    uint64_t start, end;      /* addresses */
    uint64_t categories;
} um__page_run;
#define UM__SCAN_PAGES _IOWR('f', 16, um__scan_arguments)
enum { UM__PAGE_IS_PRESENT = 1 << 3, UM__PAGE_IS_HUGE = 1 << 6 };

/* Returns the arguments of a scan of [start, end) for pages that are present, and for huge ones. */
static inline um__scan_arguments um__scan_of(uint64_t start, uint64_t end, void *runs, uint64_t n) {
    return (um__scan_arguments){.size = sizeof(um__scan_arguments),
                                .start = start,
                                .end = end,
                                .vec = (uintptr_t)runs,
                                .vec_len = n,
                                .category_mask = UM__PAGE_IS_PRESENT,
                                .return_mask = UM__PAGE_IS_HUGE};
}

#endif
