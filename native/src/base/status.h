/* How a call fails. Only these functions fill an um_error, so that it is always whole. */
#ifndef UM_STATUS_H
#define UM_STATUS_H

#include <stdint.h>

#include "unimem.h"

/* Each fills err, unless it is NULL, and returns the status. */
um_status um__fail(um_error *err, um_status status, const char *what);
um_status um__fail_detail(um_error *err, um_status status, um_detail detail, const char *what);
um_status um__fail_full(um_error *err, um_detail detail, uint64_t limit, uint64_t used,
                        uint64_t asked, const char *what);
/* UM_E_NOMEM for ENOMEM, UM_E_OS for every other errno. */
um_status um__fail_os(um_error *err, int os_errno, uint64_t asked, const char *call);
/* UM_E_NOMEM for any errno: some calls report a lack of memory with another one than ENOMEM. */
um_status um__fail_nomem(um_error *err, int os_errno, uint64_t asked, const char *call);
um_status um__fail_format(um_error *err, const char *rule, uint64_t offset);

/* Returns from the function with the status of a call that has failed. */
#define UM__TRY(call)                                                                              \
    do {                                                                                           \
        um_status status_ = (call);                                                                \
        if (status_ != UM_OK) {                                                                    \
            return status_;                                                                        \
        }                                                                                          \
    } while (0)

#endif
