/* Status names, and that every failure fills the whole um_error. */
#include "base/status.h"
#include "test.h"

TEST(names) {
    const char *names[] = {"UM_OK",       "UM_E_INVALID", "UM_E_FULL",  "UM_E_NOMEM", "UM_E_OS",
                           "UM_E_FORMAT", "UM_E_IO",      "UM_E_STATE", "UM_E_BUSY"};
    for (int i = 0; i <= UM_E_BUSY; i++) {
        CHECK_STR(um_status_name((um_status)i), names[i]);
    }
    CHECK(um_status_name((um_status)(UM_E_BUSY + 1)) != NULL);
    CHECK(um_status_name((um_status)-1) != NULL);
}

/* Compares all fields: those that a status does not use are 0. */
static void check_err(um_status status, um_detail detail, int os_errno, uint64_t limit,
                      uint64_t used, uint64_t asked, uint64_t offset, const char *what) {
    CHECK(test_err.status == status);
    CHECK(test_err.detail == detail);
    CHECK(test_err.os_errno == os_errno);
    CHECK_ROOM(limit, used, asked);
    CHECK_EQ(test_err.offset, offset);
    CHECK_STR(test_err.what, what);
}

TEST(fill) {
    CHECK_STATUS(UM_E_BUSY, um__fail(&test_err, UM_E_BUSY, "views"));
    check_err(UM_E_BUSY, UM_DETAIL_NONE, 0, 0, 0, 0, 0, "views");
    CHECK_STATUS(UM_E_FULL, um__fail_full(&test_err, UM_TAPE_FULL, UINT64_MAX, 2, 3, "tape"));
    check_err(UM_E_FULL, UM_TAPE_FULL, 0, UINT64_MAX, 2, 3, 0, "tape");
    CHECK_STATUS(UM_E_STATE, um__fail_detail(&test_err, UM_E_STATE, UM_TAPE_FROZEN, "frozen"));
    check_err(UM_E_STATE, UM_TAPE_FROZEN, 0, 0, 0, 0, 0, "frozen");
    CHECK_STATUS(UM_E_FORMAT, um__fail_format(&test_err, "magic", UINT64_MAX - 1));
    check_err(UM_E_FORMAT, UM_DETAIL_NONE, 0, 0, 0, 0, UINT64_MAX - 1, "magic");
    CHECK_STATUS(UM_E_OS, um__fail_os(&test_err, EACCES, 7, "open"));
    check_err(UM_E_OS, UM_DETAIL_NONE, EACCES, 0, 0, 7, 0, "open");
    CHECK_STATUS(UM_E_NOMEM, um__fail_os(&test_err, ENOMEM, 7, "mmap"));
    check_err(UM_E_NOMEM, UM_DETAIL_NONE, ENOMEM, 0, 0, 7, 0, "mmap");
}

TEST(err_may_be_null) {
    CHECK(um__fail(NULL, UM_E_STATE, "closed") == UM_E_STATE);
    CHECK(um__fail_full(NULL, UM_TAPE_FULL, 1, 2, 3, "tape") == UM_E_FULL);
    CHECK(um__fail_format(NULL, "magic", 0) == UM_E_FORMAT);
    CHECK(um__fail_os(NULL, ENOMEM, 0, "mmap") == UM_E_NOMEM);
    CHECK(um__fail_os(NULL, EPERM, 0, "mlock") == UM_E_OS);
}
