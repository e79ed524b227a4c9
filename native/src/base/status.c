/* Status codes, and the functions that fill a um_error. */
#include "base/status.h"

#include <errno.h>
#include <stdint.h>

const char *um_status_name(um_status status) {
    static const char *const names[] = {"UM_OK",      "UM_E_INVALID", "UM_E_FULL",
                                        "UM_E_NOMEM", "UM_E_OS",      "UM_E_FORMAT",
                                        "UM_E_IO",    "UM_E_STATE",   "UM_E_BUSY"};
    return (unsigned)status <= UM_E_BUSY ? names[status] : "unknown status";
}

static um_status fill(um_error *err, um_error filled) {
    if (err != NULL) {
        *err = filled;
    }
    return filled.status;
}

um_status um__fail(um_error *err, um_status status, const char *what) {
    return fill(err, (um_error){.status = status, .what = what});
}

um_status um__fail_detail(um_error *err, um_status status, um_detail detail, const char *what) {
    return fill(err, (um_error){.status = status, .detail = detail, .what = what});
}

static um_status fail_room(um_error *err, um_error filled, uint64_t limit, uint64_t used,
                           uint64_t asked) {
    filled.limit = limit;
    filled.used = used;
    filled.asked = asked;
    return fill(err, filled);
}

um_status um__fail_full(um_error *err, um_detail detail, uint64_t limit, uint64_t used,
                        uint64_t asked, const char *what) {
    um_error filled = {.status = UM_E_FULL, .detail = detail, .what = what};
    return fail_room(err, filled, limit, used, asked);
}

um_status um__fail_frozen(um_error *err, uint64_t limit, uint64_t used, uint64_t asked) {
    um_error filled = {.status = UM_E_STATE, .detail = UM_TAPE_FROZEN, .what = "frozen"};
    return fail_room(err, filled, limit, used, asked);
}

static um_status fail_call(um_error *err, um_status status, int os_errno, uint64_t asked,
                           const char *call) {
    return fill(err,
                (um_error){.status = status, .os_errno = os_errno, .asked = asked, .what = call});
}

um_status um__fail_os(um_error *err, int os_errno, uint64_t asked, const char *call) {
    return fail_call(err, os_errno == ENOMEM ? UM_E_NOMEM : UM_E_OS, os_errno, asked, call);
}

um_status um__fail_nomem(um_error *err, int os_errno, uint64_t asked, const char *call) {
    return fail_call(err, UM_E_NOMEM, os_errno, asked, call);
}

um_status um__fail_io(um_error *err, int os_errno, uint64_t asked, const char *call) {
    return fail_call(err, UM_E_IO, os_errno, asked, call);
}

um_status um__fail_file(um_error *err, int os_errno, uint64_t file, uint64_t offset,
                        uint64_t nbytes, const char *what) {
    um_error filled = {.status = UM_E_IO, .os_errno = os_errno, .used = file, .what = what};
    filled.offset = offset;
    filled.asked = nbytes;
    return fill(err, filled);
}

um_status um__fail_format(um_error *err, const char *rule, uint64_t offset) {
    return fill(err, (um_error){.status = UM_E_FORMAT, .offset = offset, .what = rule});
}
