/* Files of /proc and /sys, read whole or line by line, with any number of bytes from each read. */
#include "fault_os.h"
#include "os/proc_file.h"

static const char path[] = "/invented";

TEST(text) {
    char text[16];
    size_t limits[] = {0, 1, 3};
    os_state_begin();
    for (size_t i = 0; i < 3; i++) {
        fault_os_limit_read(limits[i]);
        fault_os_file(path, "0-3\n");
        CHECK(um__proc_text(path, text, sizeof text) == 0);
        CHECK_STR(text, "0-3\n");
        CHECK(um__proc_text(path, text, 3) == 0);
        CHECK_STR(text, "0-");
        CHECK(um__proc_text(path, text, 1) == 0);
        CHECK_STR(text, "");
        fault_os_file(path, "");
        CHECK(um__proc_text(path, text, sizeof text) == 0);
        CHECK_STR(text, "");
    }
    fault_os_limit_read(0);
    fault_os_file(path, NULL);
    strcpy(text, "before");
    CHECK(um__proc_text(path, text, sizeof text) == ENOENT);
    CHECK_STR(text, "");
    fault_os_file(path, "text");
    for (unsigned n = 1; n <= 4; n++) {
        static const int results[] = {EIO, EIO, EIO, 0}; /* open, two reads, close */
        fault_os_fail_nth(n, EIO);
        CHECK(um__proc_text(path, text, sizeof text) == results[n - 1]);
        CHECK_STR(text, n < 4 ? "" : "text");
    }
    fault_os_fail_nth(2, EINTR);
    CHECK(um__proc_text(path, text, sizeof text) == 0);
    CHECK_STR(text, "text");
    fault_os_fail_nth(0, 0);
    CHECK(os_state_unchanged());
}

static void check_lines(const char *text, const char *const *expected, size_t n_expected) {
    static um__proc_lines lines;
    size_t sizes[] = {1, 7, 256, 1 << 20}, limits[] = {0, 5};
    fault_os_file(path, text);
    for (int i = 0; i < 8; i++) {
        char *line = NULL;
        size_t n = 0;
        fault_os_limit_read(limits[i / 4]);
        REQUIRE(um__proc_lines_open(&lines, path, sizes[i % 4]) == 0);
        while (um__proc_lines_next(&lines, &line) == 0 && line != NULL) {
            REQUIRE(n < n_expected);
            CHECK_STR(line, expected[n]);
            n++;
        }
        CHECK_EQ(n, n_expected);
        um__proc_lines_close(&lines);
    }
    fault_os_limit_read(0);
}

TEST(lines) {
    static char text[100000], tail[100000];
    os_state_begin();
    check_lines("", NULL, 0);
    check_lines("without an end", NULL, 0);
    check_lines("one\n\nthree\nrest", (const char *const[]){"one", "", "three"}, 3);
    /* A line that fits into the buffer with its end is whole; of a longer one, only the end is
     * kept. */
    for (size_t n = sizeof((um__proc_lines *)0)->buffer - 1; n < sizeof text - 10; n += 20000) {
        memset(text, 'x', n);
        strcpy(text + n, "\nlast\n");
        AUTO_FREE um__proc_lines *lines = malloc(sizeof *lines);
        char *line;
        fault_os_file(path, text);
        REQUIRE(lines != NULL);
        REQUIRE(um__proc_lines_open(lines, path, 4096) == 0);
        REQUIRE(um__proc_lines_next(lines, &line) == 0);
        REQUIRE(line != NULL);
        strcpy(tail, line);
        CHECK(strspn(tail, "x") == strlen(tail));
        CHECK(n == sizeof lines->buffer - 1 ? strlen(tail) == n : strlen(tail) < n);
        REQUIRE(um__proc_lines_next(lines, &line) == 0);
        REQUIRE(line != NULL);
        CHECK_STR(line, "last");
        CHECK(um__proc_lines_next(lines, &line) == 0);
        CHECK(line == NULL);
        um__proc_lines_close(lines);
    }
    fault_os_file(path, NULL);
    CHECK(os_state_unchanged());
}
