#include "fuzz.h"

static volatile uint64_t touched; /* keeps the compiler from removing reads */

uint8_t *fuzz_copy(const uint8_t *bytes, size_t nbytes) {
    uint8_t *copy = malloc(nbytes);
    PROMISED(copy != NULL); /* glibc's malloc(0) is not NULL */
    memcpy(copy, bytes, nbytes);
    return copy;
}

uint64_t fuzz_hash(const uint8_t *bytes, size_t nbytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < nbytes; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return hash ^ hash >> 32;
}

/* By the table of well-formed byte sequences (Unicode 15, table 3-7). The parsers decode instead,
 * so this is an independent check. */
bool fuzz_is_utf8(const uint8_t *text, uint64_t nbytes) {
    static const struct {
        uint8_t first, last, second_first, second_last, length;
    } rows[] = {
        {0x00, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    uint64_t at = 0;
    while (at < nbytes) {
        size_t row = 0;
        while (row < sizeof rows / sizeof rows[0] &&
               (text[at] < rows[row].first || text[at] > rows[row].last)) {
            row++;
        }
        if (row == sizeof rows / sizeof rows[0] || rows[row].length > nbytes - at) {
            return false;
        }
        for (uint64_t i = 1; i < rows[row].length; i++) {
            uint8_t first = i == 1 ? rows[row].second_first : 0x80;
            uint8_t last = i == 1 ? rows[row].second_last : 0xbf;
            if (text[at + i] < first || text[at + i] > last) {
                return false;
            }
        }
        at += rows[row].length;
    }
    return true;
}

static int compare_texts(const void *a, const void *b) {
    const fuzz_text *x = a, *y = b;
    if (x->nbytes != y->nbytes) {
        return x->nbytes < y->nbytes ? -1 : 1;
    }
    return memcmp(x->bytes, y->bytes, x->nbytes);
}

bool fuzz_all_differ(fuzz_text *texts, uint64_t n) {
    qsort(texts, n, sizeof *texts, compare_texts);
    for (uint64_t i = 1; i < n; i++) {
        if (compare_texts(&texts[i - 1], &texts[i]) == 0) {
            return false;
        }
    }
    return true;
}

static int compare_ranges(const void *a, const void *b) {
    const fuzz_range *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

bool fuzz_all_apart(fuzz_range *ranges, uint64_t n) {
    uint64_t n_used = 0, end = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (ranges[i].nbytes != 0) {
            ranges[n_used++] = ranges[i];
        }
    }
    qsort(ranges, n_used, sizeof *ranges, compare_ranges);
    for (uint64_t i = 0; i < n_used; i++) {
        if (ranges[i].offset < end) {
            return false;
        }
        end = fuzz_end(ranges[i].offset, ranges[i].nbytes);
    }
    return true;
}

uint64_t fuzz_end(uint64_t offset, uint64_t nbytes) {
    uint64_t end = 0;
    PROMISED(!__builtin_add_overflow(offset, nbytes, &end));
    return end;
}

void fuzz_touch(const void *bytes, uint64_t nbytes) {
    touched = fuzz_hash(bytes, nbytes);
}

void fuzz_check_status(um_status status, const um_error *err, uint64_t nbytes, uint64_t file_nbytes,
                       uint64_t last_offset) {
    um_error untouched;
    memset(&untouched, FUZZ_PATTERN, sizeof untouched);
    if (status == UM_OK) {
        PROMISED(memcmp(err, &untouched, sizeof *err) == 0);
        return;
    }
    PROMISED(status == UM_E_FORMAT || status == UM_E_FULL);
    PROMISED(err->status == status);
    PROMISED(err->what != NULL);
    PROMISED(err->what[0] != '\0');
    if (status == UM_E_FORMAT) {
        PROMISED(err->offset <= last_offset);
    } else {
        PROMISED(err->used == nbytes);
        PROMISED(err->limit <= file_nbytes);
        PROMISED(err->asked > nbytes);
        PROMISED(err->asked <= file_nbytes);
    }
}

uint64_t fuzz_largest_number(const uint8_t *bytes, size_t nbytes) {
    const uint64_t most = (uint64_t)1 << 40;
    uint64_t largest = 0, number = 0;
    for (size_t i = 0; i < nbytes; i++) {
        bool is_digit = bytes[i] >= '0' && bytes[i] <= '9';
        if (!is_digit) {
            number = 0;
        } else if (number <= most) {
            number = number * 10 + (uint64_t)(bytes[i] - '0');
        }
        if (number > largest && number <= most) {
            largest = number;
        }
    }
    return largest;
}
