/* Address space: page sizes, reservations, and the nodes that memory can lie on. */
#include "block/space.h"

#include "base/sizes.h"
#include "base/status.h"
#include "os/os.h"
#include "os/proc_file.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

size_t um_page_bytes(void) {
    return um__os_page_bytes();
}

size_t um_huge_page_bytes(void) {
    char text[32];
    int os_errno =
        um__proc_text("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof text);
    return os_errno != 0 ? 0 : (size_t)strtoull(text, NULL, 10);
}

um_status um__space_reserve(um__space *out, size_t nbytes, size_t align, size_t phase, size_t asked,
                            um_error *err) {
    size_t page = um__os_page_bytes(), reserved_nbytes;
    UM__INVALID_IF(!um__add(nbytes, align + 2 * page, &reserved_nbytes), err, "nbytes");
    void *reserved;
    UM__TRY_OS(um__os_reserve(reserved_nbytes, &reserved), err, asked, "mmap");
    /* The reservation is larger than needed, so that the data can be aligned inside it. The rest
     * goes back. */
    uintptr_t start = (uintptr_t)reserved, end = start + reserved_nbytes;
    uintptr_t data = ((start + page - phase + align - 1) & ~(uintptr_t)(align - 1)) + phase;
    uintptr_t map_base = data - page, map_end = data + nbytes + page;
    int os_errno = 0;
    if (map_base > start) {
        os_errno = um__os_unmap(reserved, map_base - start);
        start = os_errno == 0 ? map_base : start;
    }
    if (os_errno == 0 && end > map_end) {
        os_errno = um__os_unmap((void *)map_end, end - map_end);
    }
    if (os_errno != 0) {
        /* Unmaps only what is still ours: another thread may have mapped what was given back. */
        um__os_unmap((void *)start, end - start);
        return um__fail_os(err, os_errno, asked, "munmap");
    }
    *out = (um__space){
        .data = (void *)data, .map_base = (void *)map_base, .map_nbytes = map_end - map_base};
    return UM_OK;
}

size_t um__space_align(size_t page, size_t nbytes) {
    size_t huge_page = um_huge_page_bytes();
    return huge_page > page && nbytes >= huge_page ? huge_page : page;
}

unsigned um__hugetlb_shift(um_pages pages) {
    return pages == UM_PAGES_2M ? 21 : pages == UM_PAGES_1G ? 30 : 0;
}

int um__only_memory_node(void) {
    char text[64], *after;
    if (um__proc_text("/sys/devices/system/node/has_memory", text, sizeof text) != 0) {
        return -1;
    }
    unsigned long node = strtoul(text, &after, 10);
    bool one = after != text && (*after == '\n' || *after == '\0') && node < UM_MAX_NODES;
    return one ? (int)node : -1;
}
