/* Helpers for the tests of headers: a file that is written field by field, and parsed from bytes
 * that end where an allocation ends, so that a sanitizer sees a read past them. The test says first
 * what HEADER, PARSE and FREE are. */
#ifndef UM_FORMATS_H
#define UM_FORMATS_H

#include "fault_os.h"

enum { FILE_MAX = 1 << 16, N_DAMAGED = 20000 };

static unsigned char file[FILE_MAX];
static size_t file_nbytes;
static size_t marked; /* the offset of the field that a rule is about */

static void put(const void *bytes, size_t nbytes) {
    REQUIRE(nbytes <= FILE_MAX - file_nbytes);
    memcpy(file + file_nbytes, bytes, nbytes);
    file_nbytes += nbytes;
}

static void put_zeros(size_t nbytes) {
    static const unsigned char zeros[FILE_MAX];
    put(zeros, nbytes);
}

/* Parses the first nbytes of `file` as part of a file of `size`. */
static um_status parse(HEADER *out, size_t nbytes, uint64_t size) {
    AUTO_FREE unsigned char *exact = allocate(nbytes);
    memcpy(exact, file, nbytes);
    um_status status = PARSE(out, exact, nbytes, size, &test_err);
    return status;
}

static void check_parses(size_t nbytes, uint64_t size) {
    HEADER parsed;
    if (CHECK_OK(parse(&parsed, nbytes, size))) {
        FREE(&parsed);
    }
}

static void check_fails(um_status expected, size_t nbytes, uint64_t size) {
    HEADER untouched;
    SPOIL(untouched);
    CHECK_DETAIL(expected, expected == UM_E_FULL ? UM_HEADER_FULL : UM_DETAIL_NONE,
                 parse(&untouched, nbytes, size));
    CHECK_SPOILT(untouched);
}

/* `file` must break the rule, at the mark. */
static void check_breaks(const char *rule) {
    check_fails(UM_E_FORMAT, file_nbytes, file_nbytes);
    REQUIRE(test_err.status == UM_E_FORMAT);
    CHECK_STR(test_err.what, rule);
    CHECK_EQ(test_err.offset, marked);
}

static void check_failing_allocations(unsigned n_at_least) {
    fault_os_fail_nth_alloc(0);
    check_parses(file_nbytes, file_nbytes);
    unsigned n_allocs = fault_os_allocs();
    CHECK(n_allocs >= n_at_least);
    for (unsigned n = 1; n <= n_allocs; n++) {
        fault_os_fail_nth_alloc(n);
        check_fails(UM_E_NOMEM, file_nbytes, file_nbytes);
        CHECK_EQ(test_err.os_errno, ENOMEM);
        CHECK(test_err.asked > 0);
    }
    fault_os_fail_nth_alloc(0);
}

/* Changes bytes of the header, some of them to a byte of `tokens`, and cuts some files off. */
static void check_random_damage(void (*put_file)(void), size_t n_data, const char *tokens,
                                size_t n_tokens, void (*check_parsed)(const HEADER *, size_t)) {
    uint64_t state = 2;
    unsigned n_ok = 0, n_format = 0;
    for (int round = 0; round < N_DAMAGED; round++) {
        put_file();
        for (uint64_t i = test_random(&state) % 4; i > 0; i--) {
            size_t at = test_random(&state) % (file_nbytes - n_data);
            uint64_t what = test_random(&state);
            file[at] = (unsigned char)(what % 3 == 0   ? file[at] ^ 1u << what / 3 % 8
                                       : what % 3 == 1 ? what >> 8
                                                       : (uint64_t)tokens[what / 3 % n_tokens]);
        }
        HEADER parsed;
        size_t cut = test_random(&state) % file_nbytes;
        size_t nbytes = test_random(&state) % 4 == 0 ? cut : file_nbytes;
        test_err_pattern(&test_err);
        um_status status = parse(&parsed, nbytes, nbytes);
        if (status == UM_OK) {
            n_ok++;
            check_parsed(&parsed, nbytes);
            FREE(&parsed);
        } else {
            n_format++;
            CHECK(status == UM_E_FORMAT);
            CHECK(test_err.offset <= nbytes);
        }
    }
    CHECK(n_ok > 0);
    CHECK(n_format > 0);
}

#endif
