/* Status codes, and the functions that fill an um_error. */
#include "base/status.h"

#include <errno.h>
#include <stdint.h>

const char *um_status_name(um_status status) {
    switch (status) {
    case UM_OK:
        return "UM_OK";
    case UM_E_INVALID:
        return "UM_E_INVALID";
    case UM_E_FULL:
        return "UM_E_FULL";
    case UM_E_NOMEM:
        return "UM_E_NOMEM";
    case UM_E_OS:
        return "UM_E_OS";
    case UM_E_FORMAT:
        return "UM_E_FORMAT";
    case UM_E_IO:
        return "UM_E_IO";
    case UM_E_STATE:
        return "UM_E_STATE";
    case UM_E_BUSY:
        return "UM_E_BUSY";
    }
    return "unknown status";
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

um_status um__fail_full(um_error *err, um_detail detail, uint64_t limit, uint64_t used,
                        uint64_t asked, const char *what) {
    return fill(err, (um_error){.status = UM_E_FULL,
                                .detail = detail,
                                .limit = limit,
                                .used = used,
                                .asked = asked,
                                .what = what});
}

um_status um__fail_os(um_error *err, int os_errno, uint64_t asked, const char *call) {
    um_status status = os_errno == ENOMEM ? UM_E_NOMEM : UM_E_OS;
    return fill(err,
                (um_error){.status = status, .os_errno = os_errno, .asked = asked, .what = call});
}

um_status um__fail_nomem(um_error *err, int os_errno, uint64_t asked, const char *call) {
    return fill(
        err, (um_error){.status = UM_E_NOMEM, .os_errno = os_errno, .asked = asked, .what = call});
}

um_status um__fail_format(um_error *err, const char *rule, uint64_t offset) {
    return fill(err, (um_error){.status = UM_E_FORMAT, .offset = offset, .what = rule});
}
