/* Names in headers: well-formed UTF-8, and names that differ, even if their hashes do not. */
#include "formats/names.h"
#include "test.h"

static uint64_t utf8_nbytes(const char *text) {
    size_t nbytes = strlen(text);
    unsigned char *exact = malloc(nbytes + 1); /* so that a sanitizer sees a read past the end */
    REQUIRE(exact != NULL);
    memcpy(exact + 1, text, nbytes);
    uint64_t n = um__utf8_nbytes(exact + 1, nbytes);
    free(exact);
    return n;
}

/* Each of the texts, behind a number of letters, and with letters behind it or not. */
static void check_utf8(const char *texts, size_t n_before, bool good) {
    for (size_t n = 0; *texts != '\0'; texts += n + (texts[n] == ' ')) {
        char text[64];
        n = strcspn(texts, " ");
        memset(text, 'x', n_before);
        snprintf(text + n_before, sizeof text - n_before, "%.*s0123456789", (int)n, texts);
        CHECK_EQ(utf8_nbytes(text), good ? strlen(text) : n_before);
        text[n_before + n] = '\0';
        CHECK_EQ(utf8_nbytes(text), good ? strlen(text) : n_before);
    }
}

TEST(utf8) {
    /* Separated by blanks. */
    static const char good[] = "a \x7f \xc2\x80 \xdf\xbf \xe0\xa0\x80 \xed\x9f\xbf \xee\x80\x80 "
                               "\xef\xbf\xbf \xf0\x90\x80\x80 \xf4\x8f\xbf\xbf";
    static const char bad[] = "\x80 \xc3 \xc0\x80 \xc1\xbf \xc3\xc3 \xe0\x9f\xbf \xe2\x82 "
                              "\xe2\x28\xa1 \xed\xa0\x80 \xed\xbf\xbf \xf0\x8f\xbf\xbf "
                              "\xf4\x90\x80\x80 \xf0\x9f\x98 \xf8\x88\x80\x80\x80 \xff";
    /* ASCII is skipped eight bytes at a time: the next character may begin at any of them. */
    for (size_t n_before = 0; n_before < 20; n_before++) {
        check_utf8(good, n_before, true);
        check_utf8(bad, n_before, false);
    }
}

static um__name name(const char *text, uint64_t offset) {
    return um__name_of((const unsigned char *)text, strlen(text), offset);
}

TEST(names_differ) {
    uint64_t offset = 0;
    um__name names[] = {name("a", 9), name("", 1), name("ab", 2), name("b", 3), name("ba", 4)};
    CHECK(um__names_differ(names, 0, &offset));
    CHECK(um__names_differ(names, 1, &offset));
    CHECK(um__names_differ(names, 5, &offset));
    CHECK_EQ(offset, 0);
    /* Among two pairs and a triple: the first name that was there before. */
    um__name twice[] = {name("c", 90), name("b", 70), name("a", 10), name("c", 20),
                        name("b", 60), name("a", 50), name("a", 30), name("d", 5)};
    CHECK(!um__names_differ(twice, 8, &offset));
    CHECK_EQ(offset, 30);
}

/* Any names can be given the same hash: then their bytes decide. */
TEST(names_of_one_hash) {
    static char texts[100][8];
    um__name names[100];
    uint64_t offset = 0;
    for (uint32_t i = 0; i < 100; i++) {
        snprintf(texts[i], sizeof texts[i], "%u", i * 37 % 100 * 11);
        names[i] = name(texts[i], 1000 - i);
        names[i].hash = 7;
    }
    CHECK(um__names_differ(names, 100, &offset));
    names[0] = name("550", 5000);
    names[0].hash = 7;
    CHECK(!um__names_differ(names, 100, &offset));
    CHECK_EQ(offset, 5000);
}
