/* How a call fails. Only these functions fill a um_error, so that it is always whole. */
#ifndef UM_STATUS_H
#define UM_STATUS_H

#include <stdint.h>

#include "unimem.h"

/* Each fills err, unless it is NULL, and returns the status. */
um_status um__fail(um_error *err, um_status status, const char *what);
um_status um__fail_detail(um_error *err, um_status status, um_detail detail, const char *what);
um_status um__fail_full(um_error *err, um_detail detail, uint64_t limit, uint64_t used,
                        uint64_t asked, const char *what);
um_status um__fail_frozen(um_error *err, uint64_t limit, uint64_t used, uint64_t asked);
/* UM_E_NOMEM for ENOMEM, UM_E_OS for every other errno. */
um_status um__fail_os(um_error *err, int os_errno, uint64_t asked, const char *call);
/* UM_E_NOMEM for any errno: some calls report a lack of memory by another one than ENOMEM. */
um_status um__fail_nomem(um_error *err, int os_errno, uint64_t asked, const char *call);
um_status um__fail_io(um_error *err, int os_errno, uint64_t asked, const char *call);
/* UM_E_IO of nbytes at an offset of a file, by its number. */
um_status um__fail_file(um_error *err, int os_errno, uint64_t file, uint64_t offset,
                        uint64_t nbytes, const char *what);
um_status um__fail_format(um_error *err, const char *rule, uint64_t offset);

#define UM__RETURN_IF(condition, status)                                                           \
    do {                                                                                           \
        if (condition) {                                                                           \
            return status;                                                                         \
        }                                                                                          \
    } while (0)
/* Each fails if the condition holds: the first for a wrong argument, the second for a file that
 * breaks a rule. */
#define UM__INVALID_IF(condition, err, what)                                                       \
    UM__RETURN_IF(condition, um__fail(err, UM_E_INVALID, what))
#define UM__BREAKS_IF(condition, err, rule, offset)                                                \
    UM__RETURN_IF(condition, um__fail_format(err, rule, offset))

/* Returns the status of a call that has failed. */
#define UM__TRY(call)                                                                              \
    do {                                                                                           \
        um_status status_ = (call);                                                                \
        UM__RETURN_IF(status_ != UM_OK, status_);                                                  \
    } while (0)
/* Fails if a call of os.h does. */
#define UM__TRY_OS(call, err, asked, name)                                                         \
    do {                                                                                           \
        int os_errno_ = (call);                                                                    \
        UM__RETURN_IF(os_errno_ != 0, um__fail_os(err, os_errno_, asked, name));                   \
    } while (0)

#endif
