/* Names in the headers of model files: whether they are UTF-8, and whether they differ. */
#include "formats/names.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

uint64_t um__utf8_nbytes(const unsigned char *s, uint64_t nbytes) {
    uint64_t i = 0;
    while (i < nbytes) {
        uint64_t eight;
        uint32_t c = s[i];
        uint32_t n_more, lowest;
        if (c < 0x80) {
            i++;
            /* Nearly all text is ASCII. */
            while (nbytes - i >= sizeof(eight)) {
                memcpy(&eight, s + i, sizeof(eight));
                if ((eight & 0x8080808080808080u) != 0) {
                    break;
                }
                i += sizeof(eight);
            }
            continue;
        }
        if (c >> 5 == 0x6) {
            n_more = 1, lowest = 0x80, c &= 0x1f;
        } else if (c >> 4 == 0xe) {
            n_more = 2, lowest = 0x800, c &= 0x0f;
        } else if (c >> 3 == 0x1e) {
            n_more = 3, lowest = 0x10000, c &= 0x07;
        } else {
            return i;
        }
        if (n_more >= nbytes - i) {
            return i;
        }
        for (uint32_t k = 1; k <= n_more; k++) {
            if (s[i + k] >> 6 != 0x2) {
                return i;
            }
            c = c << 6 | (s[i + k] & 0x3fu);
        }
        if (c < lowest || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff)) {
            return i;
        }
        i += n_more + 1;
    }
    return i;
}

um__name um__name_of(const unsigned char *bytes, uint64_t nbytes, uint64_t offset) {
    /* FNV-1a. Names that collide cost no more than sorting by name. */
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < nbytes; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return (um__name){hash, bytes, (uint32_t)nbytes, (uint32_t)offset};
}

static int compare_bytes(const um__name *a, const um__name *b) {
    if (a->hash != b->hash) {
        return a->hash < b->hash ? -1 : 1;
    }
    if (a->nbytes != b->nbytes) {
        return a->nbytes < b->nbytes ? -1 : 1;
    }
    return memcmp(a->bytes, b->bytes, a->nbytes);
}

static int compare_names(const void *a, const void *b) {
    const um__name *x = a, *y = b;
    int order = compare_bytes(x, y);
    return order != 0 ? order : (x->offset > y->offset) - (x->offset < y->offset);
}

bool um__names_differ(um__name *names, uint64_t n, uint64_t *out_offset) {
    qsort(names, n, sizeof(*names), compare_names);
    bool differ = true;
    for (uint64_t i = 1; i < n; i++) {
        if (compare_bytes(&names[i - 1], &names[i]) == 0 &&
            (differ || names[i].offset < *out_offset)) {
            differ = false;
            *out_offset = names[i].offset;
        }
    }
    return differ;
}
