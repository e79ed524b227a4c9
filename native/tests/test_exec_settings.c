#include "test_exec.h"

TEST(all_of_a_text_is_read) {
    um__settings read;
    um__settings_read(&read, "1 pages=2m page=4096 thp=2097152 min=65536 most=1000000 lock=1 "
                             "strict=1 prefault=123 threads=7 pid=42 report=1 trial=1 touch=0 "
                             "policy=3:a:0:1");
    CHECK(read.active && read.lock && read.strict && read.report && read.trial && !read.touch_pool);
    CHECK_EQ(read.pages, UM__2M);
    CHECK_EQ(read.min_bytes, 65536);
    CHECK_EQ(read.most_bytes, 1000000);
    CHECK_EQ(read.prefault_bytes, 123);
    CHECK_EQ(read.n_threads, 7);
    CHECK_EQ(read.pid, 42);
    CHECK_EQ(read.numa_mode, 3);
    CHECK_EQ(read.nodes[0], 10);
    CHECK_EQ(read.nodes[1], 0);
    CHECK_EQ(read.nodes[2], 1);
}

TEST(each_name_of_pages_is_known) {
    static const struct {
        const char *text;
        um__pages pages;
    } cases[] = {{"1 pages=auto", UM__AUTO},
                 {"1 pages=thp", UM__THP},
                 {"1 pages=1g min=4096", UM__1G},
                 {"1 pages=thpx", UM__AUTO}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        um__settings read;
        um__settings_read(&read, cases[i].text);
        CHECK_EQ(read.pages, cases[i].pages);
        CHECK(read.active && !read.lock && read.numa_mode == -1 && !read.trial && read.touch_pool);
    }
}

TEST(unknown_settings_change_nothing) {
    static const char *texts[] = {NULL, "", "2 pages=thp", "pages=thp", "1 min=10", "1 page=1"};
    for (size_t i = 0; i < COUNT(texts); i++) {
        um__settings read;
        um__settings_read(&read, texts[i]);
        CHECK(!read.active);
        CHECK_EQ(read.min_bytes, SIZE_MAX);
    }
}
