/* The settings: one variable of the environment, which children inherit. */
#include "exec.h"

#include <stdlib.h>
#include <string.h>

um__settings um__settings_now = {.numa_mode = -1, .min_bytes = SIZE_MAX, .heap_bytes = SIZE_MAX};

/* Finds "key=" among the words of a text. */
static const char *value_of(const char *text, const char *key) {
    size_t n = strlen(key);
    for (const char *at = text; at != NULL; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, key, n) == 0 && at[n] == '=') {
            return at + n + 1;
        }
    }
    return NULL;
}

static uint64_t number_of(const char *text, const char *key, uint64_t otherwise) {
    const char *value = value_of(text, key);
    return value == NULL ? otherwise : strtoull(value, NULL, 10);
}

static bool starts(const char *value, const char *word) {
    size_t n = strlen(word);
    return value != NULL && strncmp(value, word, n) == 0 && (value[n] == ' ' || value[n] == '\0');
}

/* Reads the nodes behind "policy=MODE:", as one number in base 16 a word: the lowest first. */
static void read_policy(um__settings *out, const char *value) {
    char *end = NULL;
    out->numa_mode = (int)strtol(value, &end, 10);
    for (size_t i = 0; i < sizeof out->nodes / sizeof out->nodes[0] && *end == ':'; i++) {
        out->nodes[i] = strtoull(end + 1, &end, 16);
    }
}

void um__settings_read(um__settings *out, const char *text) {
    static char copy[UM__TEXT_BYTES]; /* programs write over the environment (setproctitle) */
    *out = (um__settings){.numa_mode = -1, .min_bytes = SIZE_MAX, .heap_bytes = SIZE_MAX};
    if (text == NULL || strncmp(text, "1 ", 2) != 0) {
        return;
    }
    const char *pages = value_of(text, "pages"), *policy = value_of(text, "policy");
    out->pages = starts(pages, "thp")  ? UM__THP
                 : starts(pages, "2m") ? UM__2M
                 : starts(pages, "1g") ? UM__1G
                                       : UM__AUTO;
    if (policy != NULL) {
        read_policy(out, policy);
    }
    out->page_bytes = (size_t)number_of(text, "page", 4096);
    out->thp_bytes = (size_t)number_of(text, "thp", 0);
    out->min_bytes = (size_t)number_of(text, "min", 1 << 20);
    out->most_bytes = (size_t)number_of(text, "most", PTRDIFF_MAX);
    out->lock = number_of(text, "lock", 0) != 0;
    out->strict = number_of(text, "strict", 0) != 0;
    out->report = number_of(text, "report", 0) != 0;
    out->trial = number_of(text, "trial", 0) != 0;
    out->touch_pool = number_of(text, "touch", 1) != 0;
    out->prefault_bytes = number_of(text, "prefault", 0);
    out->n_threads = (unsigned)number_of(text, "threads", 1);
    out->pid = (int)number_of(text, "pid", 0);
    out->text = strncpy(copy, text, sizeof copy - 1);
    /* Below a page, nothing can be mapped. */
    out->active = out->min_bytes >= out->page_bytes && out->page_bytes >= 4096;
    if (!out->active) {
        out->min_bytes = SIZE_MAX;
    }
    out->heap_bytes = out->min_bytes;
}
